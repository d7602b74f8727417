"""Training of a first drafter, without an engine, on sequences that arrive in rounds."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tlt_trl import Drafter
from tlt_trl.drafter.pretraining import PRETRAINING_ARGUMENTS, DrafterWarmup, draft_token_ids_for
from tlt_trl.drafter.training_report import StepOutcome, StepResult


@pytest.fixture
def policy(tiny_policy_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_policy_dir, dtype=torch.float32)


def sequences(num: int, seed: int) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (ids[:4], ids[4:]) for ids in (torch.randint(4, 64, (20,), generator=generator).tolist() for _ in range(num))
    ]


def make_warmup(policy, **arguments):
    return DrafterWarmup(policy, Drafter.from_policy(policy), args=replace(PRETRAINING_ARGUMENTS, **arguments))


def test_rounds_count_from_the_beginning_and_hold_a_share_out(policy):
    warmup = make_warmup(policy, unroll_steps=2, max_tokens_per_step=64)
    warmup.add(sequences(20, seed=0))
    assert (len(warmup.held_out), len(warmup.buffer), warmup.buffer.num_tokens) == (1, 19, 19 * 20)
    warmup.train(epochs=1)
    # Three answers of 20 tokens fit into a batch.
    assert warmup.trainer.tokens_trained == 420
    for seed in range(1, 41):
        warmup.add(sequences(1, seed=seed))
    # One in twenty, also where answers come one by one.
    assert (len(warmup.held_out), warmup.buffer.num_tokens) == (3, 57 * 20)
    warmup.train(epochs=2)
    assert warmup.trainer.tokens_trained == 2 * 57 * 20
    assert warmup.evaluate()["tokens_trained"] == 2 * 57 * 20


def test_the_time_limit_counts_from_the_beginning_too(policy):
    warmup = make_warmup(policy, unroll_steps=2)
    warmup.add(sequences(4, seed=0))
    warmup.train(epochs=1)
    steps = warmup.trainer.steps
    warmup.train(epochs=1000, max_s=warmup.trained_s)
    assert warmup.trainer.steps == steps > 0


@pytest.mark.parametrize("limit", ["tokens", "seconds"])
def test_the_learning_rate_falls_to_zero_by_the_nearer_limit(policy, monkeypatch, limit):
    warmup = make_warmup(policy, unroll_steps=2, learning_rate=1.0)
    warmup.add(sequences(9, seed=0))
    rates = []

    def step():
        rates.append(warmup.trainer.learning_rate)
        warmup.trainer.tokens_trained += 16
        clock.now += 1.0
        return StepResult(StepOutcome.TRAINED, 16, {"loss": 1.0, "acceptance_length": 1.0})

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(warmup.trainer, "step", step)
    monkeypatch.setattr("tlt_trl.drafter.pretraining.time.perf_counter", lambda: clock.now)
    # 8 answers of 20 tokens: ten steps, of a second each.
    warmup.train(epochs=0.2)
    warmup.train(epochs=1, max_s=float("inf") if limit == "tokens" else 6.0, decay=True)
    expected = [1.0, 1.0] + ([1 - i / 8 for i in range(8)] if limit == "tokens" else [1 - i / 4 for i in range(4)])
    assert rates == pytest.approx(expected)


def test_training_lowers_the_loss_on_the_answers_held_out(policy):
    warmup = make_warmup(policy, unroll_steps=2, learning_rate=3e-3)
    warmup.add(sequences(60, seed=0))
    before = warmup.evaluate()["loss"]
    warmup.train(epochs=10)
    assert warmup.evaluate()["loss"] < 0.9 * before


def test_nothing_to_learn_from_is_an_error(policy):
    warmup = DrafterWarmup(policy, Drafter.from_policy(policy))
    with pytest.raises(ValueError, match="No answers"):
        warmup.add([])


def test_reduced_vocabulary_holds_the_most_frequent_and_the_wanted():
    given = [([5, 5, 6], [7]), ([5], [6, 8])]
    assert draft_token_ids_for(given, vocab_size=10, size=None) is None
    assert draft_token_ids_for(given, vocab_size=10, size=3, always=[2]).tolist() == [2, 5, 6]
