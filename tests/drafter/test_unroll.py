import pytest
import torch
from tests.tolerance import assert_close, forward_operations

from tlt_trl.drafter import attention
from tlt_trl.drafter.attention import (
    reference_unrolled_attention,
    step_blocks,
    unrolled_attention,
)
from tlt_trl.drafter.packing import pack
from tlt_trl.drafter.unroll import unroll


NUM_STEPS = 4


@pytest.fixture
def embed_tokens(policy):
    return policy.get_input_embeddings().weight.detach()


@pytest.fixture
def batch(make_sample):
    lengths = [(9, 3), (4, 2), (12, 1), (3, 2), (15, 8)]
    return pack([make_sample(n, prompt_length=p, seed=i) for i, (n, p) in enumerate(lengths)])


def token_by_token(drafter, sample, row, embed_tokens, num_steps):
    """What the engine does from position `row` on, one token at a time with a key/value cache, tokens forced."""
    ids, layer = sample.input_ids, drafter.midlayer
    keys, values = [], []

    def forward(hidden, token, position):
        rotary = drafter.rotary(torch.tensor([position]), hidden)
        inputs = layer.attention_inputs(embed_tokens[ids[token : token + 1]], hidden)
        key, value = layer.self_attn.key_value(inputs, rotary)
        keys.append(key)
        values.append(value)
        query = layer.self_attn.query(inputs, rotary)
        group = query.shape[0] // key.shape[0]
        all_keys, all_values = (torch.cat(x, dim=1).repeat_interleave(group, dim=0) for x in (keys, values))
        probs = (query @ all_keys.transpose(1, 2) * query.shape[-1] ** -0.5).softmax(dim=-1)
        return layer.finish(probs @ all_values, hidden)

    for position in range(row + 1):
        hidden = forward(drafter.fc(sample.aux_hidden_states[position : position + 1]), position + 1, position)
    outputs = [hidden]
    for step in range(1, num_steps):
        hidden = forward(hidden, row + 1 + step, row + step)
        outputs.append(hidden)
    return outputs


def test_equals_drafting_token_by_token(make_drafter, make_sample, embed_tokens):
    drafter = make_drafter()
    sample = make_sample(12, prompt_length=4, seed=3)
    batch = pack([make_sample(7, seed=1), sample, make_sample(5, seed=2)])
    with torch.no_grad():
        outputs = list(unroll(drafter, batch, embed_tokens, NUM_STEPS))
        for row in range(2, 12 - 2 - NUM_STEPS + 1):
            expected = token_by_token(drafter, sample, row, embed_tokens, NUM_STEPS)
            for step in range(NUM_STEPS):
                index = batch.rows(step).tolist().index(7 + row)
                operations = (step + 1) * forward_operations(drafter.config, num_tokens=12)
                assert_close(outputs[step][index], expected[step][0], operations)


def test_documents_do_not_see_each_other(make_drafter, make_sample, embed_tokens):
    drafter = make_drafter()
    sample = make_sample(9, prompt_length=3, seed=1)
    alone = list(unroll(drafter, pack([sample]), embed_tokens, NUM_STEPS))
    packed = pack([make_sample(11, seed=2), sample, make_sample(6, seed=3)])
    together = list(unroll(drafter, packed, embed_tokens, NUM_STEPS))
    for step in range(NUM_STEPS):
        mine = packed.document_ids[packed.rows(step)] == 1
        operations = (step + 1) * forward_operations(drafter.config, num_tokens=9)
        assert_close(together[step][mine], alone[step], operations)


def test_pairs_the_state_at_t_with_the_token_at_t_plus_1(make_drafter, make_sample, embed_tokens):
    """TLT's public online code pairs it with the token at t."""
    drafter = make_drafter()
    batch = pack([make_sample(10, prompt_length=2)])
    before = list(unroll(drafter, batch, embed_tokens, 2))

    batch.input_ids[5] = (batch.input_ids[5] + 1) % 128
    after = list(unroll(drafter, batch, embed_tokens, 2))
    changed = [(a != b).any(dim=-1).tolist() for a, b in zip(after, before, strict=True)]
    assert changed[0] == [row >= 4 for row in range(8)]
    assert changed[1] == [row >= 3 for row in range(7)]
    batch.input_ids[5] = (batch.input_ids[5] - 1) % 128

    batch.aux_hidden_states[5] += 1.0
    after = list(unroll(drafter, batch, embed_tokens, 2))
    changed = [(a != b).any(dim=-1).tolist() for a, b in zip(after, before, strict=True)]
    assert changed[0] == [row >= 5 for row in range(8)]
    assert changed[1] == [row >= 5 for row in range(7)]


@pytest.mark.parametrize("use_flash", [True, False])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_attention_equals_its_reference(batch, step, use_flash, monkeypatch):
    if not use_flash:
        monkeypatch.setattr(attention, "block_forward", attention.plain_block_forward)
        monkeypatch.setattr(attention, "block_backward", attention.plain_block_backward)
        monkeypatch.setattr(attention, "QUERY_CHUNK", 3)
    torch.manual_seed(0)
    num_rows = len(batch.rows(step))
    shapes = [(2, num_rows, 8), *2 * [(2, batch.num_tokens, 8)], *2 * [(step, 2, num_rows, 8)]]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    upstream = torch.randn(shapes[0])
    fast = unrolled_attention(*inputs, step_blocks(batch, step), 0.3)
    fast_grads = torch.autograd.grad(fast, inputs, upstream)
    reference = reference_unrolled_attention(*inputs, batch, 0.3)
    reference_grads = torch.autograd.grad(reference, inputs, upstream)
    # Scores, then the sum over keys; the backward goes the same way again.
    operations = 2 * (8 + batch.num_tokens)
    assert_close(fast, reference, operations)
    for fast_grad, reference_grad in zip(fast_grads, reference_grads, strict=True):
        assert_close(fast_grad, reference_grad, operations)


def test_documents_may_run_out_of_rows(make_drafter, make_sample, embed_tokens):
    batch = pack([make_sample(3, prompt_length=2), make_sample(4, prompt_length=2)])
    outputs = list(unroll(make_drafter(), batch, embed_tokens, NUM_STEPS))
    assert [len(output) for output in outputs] == [3, 1, 0, 0]
