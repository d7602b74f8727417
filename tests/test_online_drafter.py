import pytest

from tlt_trl.online_drafter import steps_per_rollout


@pytest.mark.parametrize(
    ("steps_per_generation", "num_iterations", "gradient_accumulation_steps", "policy_steps"),
    [(4, 1, 4, 1), (1, 1, 4, 1), (4, 2, 4, 2), (16, 1, 2, 8), (3, 1, 2, 2)],
)
def test_the_age_of_features_is_counted_in_rollouts(
    steps_per_generation, num_iterations, gradient_accumulation_steps, policy_steps
):
    assert steps_per_rollout(steps_per_generation, num_iterations, gradient_accumulation_steps) == policy_steps
