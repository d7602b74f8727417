import pytest

from tlt_trl.drafter.training_report import StepOutcome, StepResult, TrainingReport


def test_periods_add_up_before_they_divide():
    first = TrainingReport(steps=3, tokens=100, time_s=1.0, metric_sums={"loss": 6.0, "acceptance_1": 1.5})
    second = TrainingReport(steps=1, tokens=50, time_s=0.5, dropped_batches=2, metric_sums={"loss": 6.0})
    total = first + second
    assert (total.steps, total.tokens, total.time_s, total.dropped_batches) == (4, 150, 1.5, 2)
    assert total.means() == {"loss": 3.0, "acceptance_1": 0.375}
    # Neither of them has changed.
    assert first.means()["loss"] == 2.0 and second.means() == {"loss": 6.0}


def test_of_latencies_the_largest_counts():
    first = TrainingReport(stop_latency_s=0.25, idle_added_s=0.125, idle_s=1.0, idle_used_s=0.5)
    second = TrainingReport(stop_latency_s=0.125, idle_added_s=0.5, idle_s=2.0, idle_used_s=0.25)
    total = first + second
    assert (total.stop_latency_s, total.idle_added_s) == (0.25, 0.5)
    assert (total.idle_s, total.idle_used_s) == (3.0, 0.75)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_period_in_which_nothing_happened_changes_nothing(swapped):
    report = TrainingReport(steps=2, starved=1, failures=1, idle_added_s=0.5, metric_sums={"loss": 1.0})
    total = TrainingReport() + report if swapped else report + TrainingReport()
    assert total == report


def test_without_steps_there_are_no_means():
    assert TrainingReport(dropped_batches=3).means() == {}


def test_numbers_are_all_but_the_metrics():
    numbers = TrainingReport(steps=2, metric_sums={"loss": 1.0}).numbers()
    assert numbers["steps"] == 2 and "loss" not in numbers and "metric_sums" not in numbers
    assert TrainingReport(**numbers) == TrainingReport(steps=2)


def test_only_a_step_that_moved_the_weights_has_trained():
    trained = {outcome: StepResult(outcome).has_trained for outcome in StepOutcome}
    assert trained.pop(StepOutcome.TRAINED) and not any(trained.values())
