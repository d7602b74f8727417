from types import SimpleNamespace

import pytest
import torch

from tlt_trl.drafter.training_report import TrainingReport
from tlt_trl.generation.rollout_loop import RolloutStats
from tlt_trl.telemetry.alarms import Alarms
from tlt_trl.telemetry.metrics import rollout_metrics, step_metric_names, training_metrics
from tlt_trl.telemetry.reduce import sum_over_ranks


STATS = RolloutStats(
    steps=10,
    speculative_steps=8,
    time_s=2.0,
    emitted_tokens=60,
    drafts=20,
    draft_tokens=30,
    drafted_by_position=[20, 10],
    accepted_by_position=[15, 0],
)


def ranks_with(*mappings):
    """An accelerator whose ranks hold these numbers."""
    rows = torch.tensor([list(mapping.values()) for mapping in mappings])
    return SimpleNamespace(device=torch.device("cpu"), gather=lambda own: rows)


def test_numbers_of_ranks_are_added_or_maximised():
    own, other = {"a": 1.0, "b": 2.0, "late_s": 0.5}, {"a": 10.0, "b": 0.0, "late_s": 0.25}
    total = sum_over_ranks(ranks_with(own, other), {"a": 1.0, "b": 2.0}, {"late_s": 0.5})
    assert total == {"a": 11.0, "b": 2.0, "late_s": 0.5}


def test_one_rank():
    metrics = rollout_metrics(STATS.sums(3), num_positions=3, num_engines=1)
    assert metrics["tlt/acceptance_length"] == pytest.approx(1.75)
    assert metrics["tlt/rollout/tokens_per_s"] == 30.0
    assert metrics["tlt/speculation_share"] == 0.8
    assert (metrics["tlt/draft_tokens/proposed"], metrics["tlt/draft_tokens/accepted"]) == (30.0, 15.0)


def test_positions_are_divided_by_what_was_drafted_there():
    metrics = rollout_metrics(STATS.sums(3), num_positions=3, num_engines=1)
    # A collapse shows as 0.0; a position that was never drafted does not show at all.
    assert (metrics["tlt/acceptance/position_1"], metrics["tlt/acceptance/position_2"]) == (0.75, 0.0)
    assert "tlt/acceptance/position_3" not in metrics


def test_looked_up_tokens_are_told_apart():
    stats = RolloutStats(drafts=2, drafted_by_position=[2], accepted_by_position=[0], draft_tokens=2)
    stats.lookups, stats.lookup_tokens, stats.accepted_lookup_tokens = 4, 12, 10
    metrics = rollout_metrics(stats.sums(1), num_positions=1, num_engines=1)
    assert metrics["tlt/acceptance_length"] == 1.0  # a drafter of which nothing is accepted
    assert metrics["tlt/lookup/acceptance_length"] == 3.5
    assert (metrics["tlt/lookup/proposed"], metrics["tlt/lookup/accepted"]) == (12.0, 10.0)
    assert "tlt/lookup/proposed" not in rollout_metrics(STATS.sums(3), num_positions=3, num_engines=1)


def test_ranks_add_up_before_they_divide():
    total = sum_over_ranks(ranks_with(STATS.sums(3), STATS.sums(3)), STATS.sums(3))
    metrics = rollout_metrics(total, num_positions=3, num_engines=2)
    assert metrics["tlt/acceptance_length"] == pytest.approx(1.75)
    assert metrics["tlt/rollout/time_s"] == 2.0
    assert metrics["tlt/rollout/tokens_per_s"] == 60.0  # two ranks at once


def test_a_rollout_without_speculation():
    metrics = rollout_metrics(RolloutStats().sums(2), num_positions=2, num_engines=1)
    assert metrics["tlt/acceptance_length"] == 1.0
    assert metrics["tlt/speculation_share"] == metrics["tlt/rollout/tokens_per_s"] == 0.0


def totals(report):
    """What one rank hands to the sum over ranks."""
    metrics = {name: report.metric_sums.get(name, 0.0) for name in step_metric_names(2)}
    return report.numbers() | metrics | {"feature_capture_s": 0.0, "buffer_tokens": 0.0}


FIRST = TrainingReport(
    idle_s=4.0,
    idle_used_s=3.0,
    stop_latency_s=0.05,
    idle_added_s=0.1,
    tokens=100,
    steps=3,
    time_s=3.5,
    metric_sums={"loss": 6.0, "acceptance_1": 1.5},
)
SECOND = TrainingReport(
    idle_added_s=0.2, tokens=50, steps=1, failures=1, starved=1, metric_sums={"loss": 6.0, "acceptance_1": 0.1}
)


def test_reports_add_up():
    both = FIRST + SECOND
    assert (both.steps, both.tokens, both.failures, both.starved, both.time_s) == (4, 150, 1, 1, 3.5)
    assert (both.stop_latency_s, both.idle_added_s) == (0.05, 0.2)  # the longest
    assert both.means() == {"loss": 3.0, "acceptance_1": 0.4}
    assert FIRST + TrainingReport() == FIRST
    assert TrainingReport().means() == {}


def test_drafter_training_of_two_ranks():
    metrics = training_metrics(totals(FIRST + SECOND), num_ranks=2, unroll_steps=2)
    assert metrics["tlt/idle_s"] == 2.0 and metrics["tlt/idle_used_fraction"] == 0.75
    assert metrics["tlt/stop_latency_s"] == 0.05 and metrics["tlt/idle_added_s"] == 0.2
    assert metrics["tlt/drafter_tokens"] == 150.0 and metrics["tlt/drafter/steps"] == 4.0
    assert metrics["tlt/drafter/time_s"] == 1.75 and metrics["tlt/drafter/failures"] == 1.0
    assert metrics["tlt/drafter/starved"] == 1.0
    assert metrics["tlt/drafter/loss"] == 3.0
    assert metrics["tlt/drafter/acceptance_1"] == pytest.approx(0.4)


def test_drafter_training_of_nobody():
    metrics = training_metrics(totals(TrainingReport()), num_ranks=1, unroll_steps=2)
    assert metrics["tlt/idle_s"] == metrics["tlt/drafter_tokens"] == 0.0
    assert "tlt/idle_used_fraction" not in metrics and "tlt/drafter/loss" not in metrics


def test_alarms_of_drafter_training(caplog):
    alarms = Alarms()
    for _ in range(3):  # the first of them does not count: before the first rollout there are no features
        alarms.observe_training(starved=1.0, steps=0.0, dropped_batches=0.0, failures=0.0)
    assert not alarms.active["drafter_starved"]
    alarms.observe_training(starved=1.0, steps=0.0, dropped_batches=0.0, failures=0.0)
    assert alarms.active["drafter_starved"] and "feature buffer is empty" in caplog.text
    alarms.observe_training(starved=1.0, steps=5.0, dropped_batches=2.0, failures=0.0)
    assert not alarms.active["drafter_starved"] and alarms.active["drafter_training_failed"]
    alarms.observe_training(starved=0.0, steps=0.0, dropped_batches=0.0, failures=0.0)
    assert not any(alarms.active.values())
