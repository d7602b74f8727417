import pytest

from tlt_trl.generation.rollout_loop import RolloutStats
from tlt_trl.telemetry.metrics import rollout_metrics, rollout_sums


STATS = RolloutStats(
    steps=10,
    speculative_steps=8,
    seconds=2.0,
    emitted_tokens=60,
    drafts=20,
    draft_tokens=30,
    drafted_by_position=[20, 10],
    accepted_by_position=[15, 0],
)


def test_one_rank():
    metrics = rollout_metrics(rollout_sums(STATS, num_positions=3), num_ranks=1)
    assert metrics["tlt/acceptance_length"] == pytest.approx(1.75)
    assert metrics["tlt/rollout/tokens_per_s"] == 30.0
    assert metrics["tlt/speculation_share"] == 0.8
    assert (metrics["tlt/draft_tokens/proposed"], metrics["tlt/draft_tokens/accepted"]) == (30.0, 15.0)


def test_positions_are_divided_by_what_was_drafted_there():
    metrics = rollout_metrics(rollout_sums(STATS, num_positions=3), num_ranks=1)
    # A collapse shows as 0.0; a position that was never drafted does not show at all.
    assert (metrics["tlt/acceptance/position_0"], metrics["tlt/acceptance/position_1"]) == (0.75, 0.0)
    assert "tlt/acceptance/position_2" not in metrics


def test_ranks_add_up_before_they_divide():
    sums = [2 * value for value in rollout_sums(STATS, num_positions=3)]
    metrics = rollout_metrics(sums, num_ranks=2)
    assert metrics["tlt/acceptance_length"] == pytest.approx(1.75)
    assert metrics["tlt/rollout/seconds"] == 2.0
    assert metrics["tlt/rollout/tokens_per_s"] == 60.0  # two ranks at once


def test_a_rollout_without_speculation():
    metrics = rollout_metrics(rollout_sums(RolloutStats(), num_positions=2), num_ranks=1)
    assert metrics["tlt/acceptance_length"] == 1.0
    assert metrics["tlt/speculation_share"] == metrics["tlt/rollout/tokens_per_s"] == 0.0
