"""
The distribution of an engine as users have it: compiled, in bfloat16, with a head that is tied to the embedding, and
with long drafts. The reference is the policy in bfloat16, whose roundings differ from the engine's; they are small
against what a fault does, as the test at a wrong temperature shows. No filters here: rounding moves tokens over their
edges.
"""

import pytest
import torch
from tests.lossless.lossless_tools import (
    SIGNIFICANCE,
    VOCAB_SIZE,
    EngineUnderTest,
    eagle3,
    in_turn,
    rollout_p_value,
    save_predictable_policy,
    trained_drafter,
)


pytest.importorskip("vllm")
pytestmark = pytest.mark.engine
LENGTH = 64


@pytest.fixture(scope="module")
def under_test(make_tiny_policy, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("tied"))
    policy = save_predictable_policy(make_tiny_policy, directory, tied=True)
    drafter = trained_drafter(policy)
    return EngineUnderTest(
        policy.bfloat16(),
        directory,
        drafter,
        str(tmp_path_factory.mktemp("drafter")),
        max_draft_tokens=8,
        dtype="bfloat16",
        enforce_eager=False,
        max_num_seqs=320,
    )


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(4, VOCAB_SIZE, (320, 4), generator=generator).tolist()


@pytest.mark.parametrize(
    ("num_draft_tokens", "drafts", "temperature"),
    [
        (8, "greedy", 1.0),
        (8, "probabilistic", 0.7),
        pytest.param(3, "greedy", 0.7, marks=pytest.mark.slow),
        pytest.param(5, "probabilistic", 1.0, marks=pytest.mark.slow),
    ],
)
def test_every_token_follows_the_policy(under_test, prompts, num_draft_tokens, drafts, temperature):
    rollout = under_test.rollout(prompts, eagle3(num_draft_tokens, drafts), max_tokens=LENGTH, temperature=temperature)
    assert rollout.first_acceptance > 0.25 and rollout.accepted_by_position[num_draft_tokens - 1] > 0

    def p_value(reference):
        return rollout_p_value(under_test.policy, prompts, rollout.token_ids, temperature=reference)

    assert p_value(temperature) > SIGNIFICANCE > p_value(1.1 * temperature)


def test_draft_lengths_that_change(under_test, prompts):
    strategies = [eagle3(length) for length in (0, 8, 1, 5, 0, 7, 3)]
    rollout = under_test.rollout(prompts, in_turn(*strategies), max_tokens=LENGTH, temperature=1.0)
    assert rollout_p_value(under_test.policy, prompts, rollout.token_ids, temperature=1.0) > SIGNIFICANCE
