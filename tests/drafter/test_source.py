from contextlib import contextmanager, nullcontext

import pytest
import torch
from tests.drafter.conftest import VOCAB_SIZE

from tlt_trl.drafter.source import build_drafter


class WordTokenizer:
    """Words are token ids."""

    all_special_ids = (0, 1)

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [int(word) for word in text.split()]}


def build(policy, **kwargs):
    defaults = {
        "given": None,
        "name_or_path": None,
        "vocab_size": None,
        "train_dataset": None,
        "tokenizer": WordTokenizer(),
        "gather_params": lambda parameters: nullcontext(),
    }
    return build_drafter(policy, **defaults | kwargs)


def test_one_that_is_given_is_taken_before_all_others(policy, make_drafter, tmp_path):
    given, saved = make_drafter(), make_drafter(seed=2)
    saved.save_pretrained(tmp_path)
    assert build(policy, given=given, name_or_path=str(tmp_path)) is given


def test_one_that_is_loaded_is_taken_before_one_that_is_made(policy, make_drafter, tmp_path):
    saved = make_drafter()
    saved.save_pretrained(tmp_path)
    loaded = build(policy, name_or_path=str(tmp_path))
    assert all(map(torch.equal, loaded.state_dict().values(), saved.state_dict().values()))


def test_one_that_is_made_starts_from_the_policy(policy):
    drafter = build(policy)
    assert drafter.has_full_vocabulary
    assert torch.equal(drafter.lm_head.weight, policy.get_output_embeddings().weight)


def test_it_is_trained_in_fp32(policy, make_drafter):
    assert {p.dtype for p in build(policy, given=make_drafter().to(torch.bfloat16)).parameters()} == {torch.float32}
    assert {p.dtype for p in build(policy.to(torch.bfloat16)).parameters()} == {torch.float32}


def test_reduced_vocabulary_holds_the_frequent_and_the_special_tokens(policy):
    rows = [{"prompt": "7 7 9"}, {"prompt": "9 7 100", "solution": ["9"]}]
    drafter = build(policy, vocab_size=4, train_dataset=rows)
    assert drafter.draft_token_ids.tolist() == [0, 1, 7, 9]


def test_parameters_are_whole_while_they_are_read(policy):
    gathered = []

    @contextmanager
    def gather(parameters):
        gathered.append(parameters)
        yield

    build(policy, gather_params=gather)
    (parameters,) = gathered
    assert any(parameter is policy.get_output_embeddings().weight for parameter in parameters)
    assert 0 < len(parameters) < len(list(policy.parameters()))  # the last layer, not the policy


def test_a_policy_with_adapters_is_read_without_them(policy):
    from peft import LoraConfig, get_peft_model

    plain = build(policy)
    adapted = build(get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"])))
    assert all(map(torch.equal, adapted.state_dict().values(), plain.state_dict().values()))


def test_without_text_to_count_small_ids_come_first(policy):
    assert build(policy, vocab_size=64).draft_token_ids.tolist() == list(range(64))


def test_a_large_vocabulary_is_not_drafted_whole_by_default(make_policy):
    policy = make_policy(vocab_size=40_000)
    assert build(policy).config.draft_vocab_size == 9984
    assert build(policy, vocab_size=40_000).has_full_vocabulary


class TestErrors:
    def test_a_vocabulary_larger_than_the_policys(self, policy):
        with pytest.raises(ValueError, match=f"`drafter_vocab_size` is {VOCAB_SIZE + 1}, larger .* of {VOCAB_SIZE}"):
            build(policy, vocab_size=VOCAB_SIZE + 1, train_dataset=[{"prompt": "7"}])

    @pytest.mark.parametrize("source", ["given", "name_or_path"])
    def test_a_drafter_of_another_policy(self, policy, make_policy, make_drafter, tmp_path, source):
        other = make_drafter(source=make_policy(vocab_size=VOCAB_SIZE * 2))
        other.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="vocab_size"):
            build(policy, **{source: other if source == "given" else str(tmp_path)})
