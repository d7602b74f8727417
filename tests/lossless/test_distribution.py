"""
The distribution of what the real engine samples while it speculates, against the policy's.

float32 on both sides, so that whatever differs is a fault of the sampling and not of rounding.
"""

import random

import pytest
import torch
from tests.lossless.lossless_tools import (
    MAX_DRAFT_TOKENS,
    SIGNIFICANCE,
    VOCAB_SIZE,
    eagle3,
    in_turn,
    rollout_p_value,
    sequence_p_value,
    sequence_probabilities,
)

from tlt_trl.generation.lookup import LookupDrafter


pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

DRAFTS = ("greedy", "probabilistic")
NUM_DRAFT_TOKENS = (1, 2, 3, 5)
FILTERS = {"none": {}, "top_p": {"top_p": 0.9}, "top_k": {"top_k": 20}}
PROMPT = [5, 6, 7, 8]
LENGTH = 64
NUM_SEQUENCES = 20_000


def spread_prompts(number=320):
    """Different prompts of the same length; 320 times `LENGTH` is 20 480 tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(4, VOCAB_SIZE, (number, len(PROMPT)), generator=generator).tolist()


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [pytest.param(0.7, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize(
    "num_draft_tokens", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_every_token_follows_the_policy(under_test, drafts, num_draft_tokens, temperature, filters):
    prompts, sampling = spread_prompts(), {"temperature": temperature} | FILTERS[filters]
    rollout = under_test.rollout(prompts, eagle3(num_draft_tokens, drafts), max_tokens=LENGTH, **sampling)
    assert rollout.first_acceptance > 0.3  # else the accepted branch is hardly tested
    assert rollout_p_value(under_test.policy, prompts, rollout.token_ids, **sampling) > SIGNIFICANCE


@pytest.mark.parametrize(
    ("drafts", "num_draft_tokens", "sampling"),
    [
        pytest.param("greedy", 1, {"temperature": 1.0}, marks=pytest.mark.slow),
        ("greedy", 3, {"temperature": 0.7, "top_p": 0.9}),
        ("probabilistic", 2, {"temperature": 0.7, "top_k": 20}),
        pytest.param("probabilistic", 3, {"temperature": 1.0}, marks=pytest.mark.slow),
    ],
)
def test_whole_sequences_follow_the_enumerated_distribution(under_test, drafts, num_draft_tokens, sampling):
    exact = sequence_probabilities(under_test.policy, PROMPT, 3, **sampling)
    rollout = under_test.rollout([PROMPT] * NUM_SEQUENCES, eagle3(num_draft_tokens, drafts), max_tokens=3, **sampling)
    assert rollout.first_acceptance > 0.3
    assert sequence_p_value(rollout.token_ids, exact) > SIGNIFICANCE


def test_marginals_of_whole_sequences_follow_the_enumerated_distribution(under_test):
    exact = sequence_probabilities(under_test.policy, PROMPT, 3, temperature=1.0).view([VOCAB_SIZE] * 3)
    rollout = under_test.rollout([PROMPT] * 4000, eagle3(2), max_tokens=3, temperature=1.0)
    tokens = torch.tensor(rollout.token_ids)
    for position in range(3):
        marginal = exact.sum([axis for axis in range(3) if axis != position])
        counts = torch.bincount(tokens[:, position], minlength=VOCAB_SIZE)
        expected = marginal * len(tokens)
        assert (counts - expected).abs().max() < 6 * (expected * (1 - marginal)).sqrt().max()


@pytest.mark.parametrize("drafts", DRAFTS)
def test_the_number_of_draft_tokens_may_change_in_every_step(under_test, drafts):
    prompts, strategies = spread_prompts(), [eagle3(length, drafts) for length in (0, 5, 1, 3, 0, 0, 2)]
    rollout = under_test.rollout(prompts, in_turn(*strategies), max_tokens=LENGTH, temperature=1.0)
    assert rollout.first_acceptance > 0.3
    assert rollout_p_value(under_test.policy, prompts, rollout.token_ids, temperature=1.0) > SIGNIFICANCE


def test_the_draft_sampling_may_change_in_every_step(under_test):
    prompts = spread_prompts()
    strategies = ["eagle3 x3", "eagle3 x3 probabilistic", "eagle3 x1", "eagle3 x5 probabilistic", "off"]
    rollout = under_test.rollout(prompts, in_turn(*strategies), max_tokens=LENGTH, temperature=1.0)
    assert rollout.first_acceptance > 0.3
    assert rollout_p_value(under_test.policy, prompts, rollout.token_ids, temperature=1.0) > SIGNIFICANCE


class FilledUpLookup(LookupDrafter):
    """Whatever was found, and arbitrary tokens behind it: verification must be exact for any draft."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.found = 0
        self.rng = random.Random(0)

    def propose(self, request_id, prompt, output, num_tokens):
        tokens = super().propose(request_id, prompt, output, num_tokens)
        self.found += len(tokens)
        return tokens + [self.rng.randrange(VOCAB_SIZE) for _ in range(num_tokens - len(tokens))]


@pytest.mark.parametrize(
    "plan",
    [
        ["ngram x4"],
        ["eagle3 x5", "ngram x4"],
        ["eagle3 x2", "ngram x4"],
        ["eagle3 x3", "ngram x2", "off", "ngram x4"],
    ],
    ids=str,
)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_looked_up_tokens_between_the_drafters(under_test, drafts, plan):
    prompts, engine = spread_prompts(), under_test.engine
    engine.lookup = FilledUpLookup(orders=(2, 1))
    strategies = [f"{name} {drafts}" if name.startswith("eagle3") else name for name in plan]
    rollout = under_test.rollout(prompts, in_turn(*strategies), max_tokens=LENGTH, temperature=1.0)
    assert engine.lookup.found > 2000
    assert rollout_p_value(under_test.policy, prompts, rollout.token_ids, temperature=1.0) > SIGNIFICANCE


def test_requests_that_join_and_leave_a_running_batch(under_test):
    # More requests than run at once, of different lengths, temperatures and filters.
    prompts = spread_prompts(1500)
    choices = [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 20}]
    own = [choices[i % 3] | {"max_tokens": 4 + 7 * (i % 5)} for i in range(len(prompts))]
    rollout = under_test.rollout(prompts, "eagle3 x3 probabilistic", params_by_prompt=own)
    for choice, sampling in enumerate(choices):
        for length in {params["max_tokens"] for params in own}:
            rows = [i for i, p in enumerate(own) if i % 3 == choice and p["max_tokens"] == length]
            tokens = [rollout.token_ids[i] for i in rows]
            p_value = rollout_p_value(under_test.policy, [prompts[i] for i in rows], tokens, **sampling)
            assert p_value > SIGNIFICANCE, (sampling, length)


@pytest.mark.parametrize("num_draft_tokens", NUM_DRAFT_TOKENS)
@pytest.mark.parametrize("drafts", DRAFTS)
def test_greedy_decoding_is_the_policys_argmax(under_test, drafts, num_draft_tokens):
    prompts = spread_prompts(64)
    rollout = under_test.rollout(prompts, eagle3(num_draft_tokens, drafts), max_tokens=24, temperature=0.0)
    expected = under_test.policy.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(PROMPT), dtype=torch.long),
        max_new_tokens=24,
        min_new_tokens=24,
        eos_token_id=None,
        do_sample=False,
        pad_token_id=3,
    )
    assert rollout.first_acceptance > 0.3
    assert rollout.token_ids == expected[:, len(PROMPT) :].tolist()


@pytest.mark.parametrize(("wrong", "right"), [(0.9, 1.0), (1.1, 1.0)])
def test_the_statistics_would_catch_a_wrong_temperature(under_test, wrong, right):
    prompts = spread_prompts()
    tokens = under_test.rollout(prompts, "eagle3 x3", max_tokens=LENGTH, temperature=wrong).token_ids
    assert rollout_p_value(under_test.policy, prompts, tokens, temperature=right) < SIGNIFICANCE


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 20}])
def test_the_statistics_would_catch_an_ignored_filter(under_test, filters):
    prompts = spread_prompts()
    tokens = under_test.rollout(prompts, "eagle3 x3", max_tokens=LENGTH, temperature=1.0).token_ids
    assert rollout_p_value(under_test.policy, prompts, tokens, temperature=1.0, **filters) == 0.0


def test_the_engine_was_built_for_the_longest_draft(under_test):
    assert under_test.engine.max_draft_tokens == MAX_DRAFT_TOKENS == max(NUM_DRAFT_TOKENS)
