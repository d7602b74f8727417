"""A drafter over part of the vocabulary: its probabilities have another width, and some tokens it can never draft."""

import pytest
from tests.lossless.lossless_tools import (
    SIGNIFICANCE,
    eagle3,
    rollout_p_value,
    sequence_p_value,
    sequence_probabilities,
)


pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8]


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 5])
@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_every_token_follows_the_policy(under_test_reduced, drafts, num_draft_tokens):
    prompts = [[4 + i % 28, 4 + i // 28 % 28, 9, 10] for i in range(320)]
    rollout = under_test_reduced.rollout(
        prompts, eagle3(num_draft_tokens, drafts), max_tokens=64, temperature=1.0, top_p=0.95
    )
    assert rollout.first_acceptance > 0.2
    p_value = rollout_p_value(under_test_reduced.policy, prompts, rollout.token_ids, temperature=1.0, top_p=0.95)
    assert p_value > SIGNIFICANCE


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_whole_sequences_follow_the_enumerated_distribution(under_test_reduced, drafts):
    exact = sequence_probabilities(under_test_reduced.policy, PROMPT, 2, temperature=0.7)
    rollout = under_test_reduced.rollout([PROMPT] * 6000, eagle3(1, drafts), max_tokens=2, temperature=0.7)
    assert sequence_p_value(rollout.token_ids, exact) > SIGNIFICANCE
