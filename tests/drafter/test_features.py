import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.tolerance import assert_close, forward_operations

from tlt_trl.drafter import FeatureBuffer, FeatureRecorder
from tlt_trl.drafter.features import rows_to_keep


LAYER_IDS = [1, 2, 3]
PROMPT_WIDTH = 4


@pytest.fixture
def rows():
    """Three rows, left-padded prompts and right-padded completions: input ids and attention mask."""
    input_ids = torch.randint(1, 128, (3, 12), generator=torch.Generator().manual_seed(0))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :2] = 0
    attention_mask[1, 9:] = 0
    attention_mask[2, :1] = attention_mask[2, 8:] = 0
    return input_ids, attention_mask


def position_ids(attention_mask):
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def record(policy, rows, batch_size=3, train=False):
    input_ids, attention_mask = rows
    buffer = FeatureBuffer(max_tokens=1000)
    recorder = FeatureRecorder(policy, LAYER_IDS, buffer)
    with recorder.recording(input_ids, attention_mask, PROMPT_WIDTH, step=5):
        for start in range(0, len(input_ids), batch_size):
            part = slice(start, start + batch_size)
            output = policy(
                input_ids=input_ids[part],
                attention_mask=attention_mask[part],
                position_ids=position_ids(attention_mask[part]),
                use_cache=False,
            )
            if train:
                output.logits.float().logsumexp(-1).mean().backward()
    recorder.remove()
    return buffer.samples


def assert_same_samples(given, expected):
    assert len(given) == len(expected) > 0
    for mine, theirs in zip(given, expected, strict=True):
        assert torch.equal(mine.input_ids, theirs.input_ids)
        assert torch.equal(mine.aux_hidden_states, theirs.aux_hidden_states)
        assert torch.equal(mine.last_hidden_state, theirs.last_hidden_state)
        assert (mine.prompt_length, mine.step) == (theirs.prompt_length, theirs.step)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_equal_the_hidden_states_of_each_row_alone(make_policy, rows, kind):
    policy = make_policy(kind)
    input_ids, attention_mask = rows
    samples = record(policy, rows)
    for row, sample in enumerate(samples):
        mask = attention_mask[row].bool()
        with torch.no_grad():
            alone = policy(input_ids[row][mask][None], output_hidden_states=True).hidden_states
        assert torch.equal(sample.input_ids, input_ids[row][mask])
        assert sample.prompt_length == attention_mask[row, :PROMPT_WIDTH].sum()
        assert sample.step == 5
        expected = torch.cat([alone[layer][0] for layer in LAYER_IDS], dim=-1)
        assert sample.aux_hidden_states.dtype == sample.last_hidden_state.dtype == torch.bfloat16
        rounding = {"num_operations": forward_operations(policy.config, num_tokens=12), "computed_in": torch.float32}
        assert_close(sample.aux_hidden_states, expected.bfloat16(), **rounding)
        # The last entry of `hidden_states` is what the head reads: after the final norm.
        assert_close(sample.last_hidden_state, alone[-1][0].bfloat16(), **rounding)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_mini_batches_are_matched_in_order(policy, rows, batch_size):
    for mine, theirs in zip(record(policy, rows, batch_size), record(policy, rows), strict=True):
        assert torch.equal(mine.input_ids, theirs.input_ids)
        operations = forward_operations(policy.config, num_tokens=12)
        assert_close(mine.aux_hidden_states, theirs.aux_hidden_states, operations, computed_in=torch.float32)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(policy, rows, use_reentrant):
    expected = record(policy.train(), rows, train=True)
    policy.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    policy.enable_input_require_grads()
    assert_same_samples(record(policy, rows, batch_size=3, train=True), expected)


def test_gradient_checkpointing_with_mini_batches(policy, rows):
    expected = record(policy.train(), rows, batch_size=1, train=True)
    policy.gradient_checkpointing_enable()
    assert_same_samples(record(policy, rows, batch_size=1, train=True), expected)


def test_inside_peft(policy, rows):
    expected = record(policy, rows)
    wrapped = get_peft_model(copy.deepcopy(policy), LoraConfig(target_modules=["q_proj", "v_proj"])).eval()
    assert_same_samples(record(wrapped, rows), expected)


def test_policy_gradients_are_bit_equal(policy, rows):
    input_ids, attention_mask = rows

    def gradients(model):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids, attention_mask=attention_mask).logits
        logits.float().logsumexp(-1).mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(copy.deepcopy(policy))
    recorder = FeatureRecorder(policy, LAYER_IDS, FeatureBuffer(max_tokens=1000))
    with recorder.recording(input_ids, attention_mask, PROMPT_WIDTH, step=0):
        actual = gradients(policy)
    assert len(recorder.buffer) == 3
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_is_silent_when_not_armed_or_removed(policy, rows):
    input_ids, attention_mask = rows
    recorder = FeatureRecorder(policy, LAYER_IDS, FeatureBuffer(max_tokens=1000))
    policy(input_ids)
    recorder.remove()
    with recorder.recording(input_ids, attention_mask, PROMPT_WIDTH, step=0):
        policy(input_ids)
    assert len(recorder.buffer) == 0


def test_completion_mask_gives_the_prompt_width(policy, rows):
    input_ids, attention_mask = rows
    recorder = FeatureRecorder(policy, LAYER_IDS, FeatureBuffer(max_tokens=1000))
    with recorder.recording(input_ids, attention_mask, attention_mask[:, PROMPT_WIDTH:], step=0):
        policy(input_ids, attention_mask=attention_mask)
    assert [sample.prompt_length for sample in recorder.buffer.samples] == [2, 4, 3]


def test_rows_without_an_answer_are_left_out(policy, rows):
    input_ids, attention_mask = rows
    attention_mask[1, PROMPT_WIDTH:] = 0
    assert len(record(policy, (input_ids, attention_mask))) == 2


@pytest.mark.parametrize("wrong", ["length", "too many"])
def test_unannounced_rows_are_an_error(policy, rows, wrong):
    input_ids, attention_mask = rows
    recorder = FeatureRecorder(policy, LAYER_IDS, FeatureBuffer(max_tokens=1000))
    with pytest.raises(ValueError, match="told of 3 rows of 12 tokens"):
        with recorder.recording(input_ids, attention_mask, PROMPT_WIDTH, step=0):
            policy(input_ids[:, :8] if wrong == "length" else input_ids)
            policy(input_ids)
    assert len(recorder.buffer) == 0


@pytest.mark.parametrize(
    ("lengths", "prompt_lengths", "max_tokens", "kept"),
    [
        ([10, 20, 30], [5, 5, 5], 60, {0, 1, 2}),
        ([10, 20, 30], [5, 5, 5], 59, {1, 2}),
        ([10, 20, 30], [5, 18, 5], 40, {0, 2}),  # the longest answers, not the longest rows
        ([10, 20, 100], [5, 5, 5], 40, {0, 1}),  # one that does not fit at all does not keep the others out
        ([10, 10, 10], [5, 5, 5], 25, {0, 1}),
        ([5, 2, 3], [5, 1, 2], 100, {2}),  # without an answer, and too short to predict a token of
    ],
)
def test_only_rows_that_fit_are_copied(lengths, prompt_lengths, max_tokens, kept):
    assert rows_to_keep(lengths, prompt_lengths, max_tokens) == kept
