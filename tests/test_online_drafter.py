import pytest
import torch

from tlt_trl.drafter.pass_to_record import PassToRecord
from tlt_trl.online_drafter import steps_per_rollout


@pytest.mark.parametrize(
    ("steps_per_generation", "num_iterations", "gradient_accumulation_steps", "policy_steps"),
    [(4, 1, 4, 1), (1, 1, 4, 1), (4, 2, 4, 2), (16, 1, 2, 8), (3, 1, 2, 2)],
)
def test_the_age_of_features_is_counted_in_rollouts(
    steps_per_generation, num_iterations, gradient_accumulation_steps, policy_steps
):
    assert steps_per_rollout(steps_per_generation, num_iterations, gradient_accumulation_steps) == policy_steps


def passes(rule, micro_steps=1):
    """What is recorded of a generation: scoring, reference, then the loss of every micro-step."""
    with torch.no_grad():
        scored = [rule.take(0), rule.take(0)]
    with torch.enable_grad():
        return scored, [rule.take(step) for step in range(micro_steps)]


class TestPassToRecord:
    def test_the_scoring_pass_and_nothing_else(self):
        rule = PassToRecord(1, 1, 1, corrects_importance=True)
        rule.start_generation(is_training=True)
        assert passes(rule) == ([True, False], [False])
        assert passes(rule) == ([False, False], [False])  # no generation in between

    def test_an_evaluation_is_not_recorded(self):
        rule = PassToRecord(1, 1, 1, corrects_importance=True)
        rule.start_generation(is_training=False)
        assert passes(rule) == ([False, False], [False])

    def test_without_a_scoring_pass_the_first_pass_of_the_loss(self):
        rule = PassToRecord(2, 2, 4, corrects_importance=False)
        rule.start_generation(is_training=True)
        assert passes(rule, micro_steps=6) == ([False, False], [True, True, False, False, True, True])

    def test_a_generation_that_serves_several_steps_is_scored(self):
        rule = PassToRecord(2, 2, 2, corrects_importance=False)
        rule.start_generation(is_training=True)
        assert passes(rule, micro_steps=2) == ([True, False], [False, False])
