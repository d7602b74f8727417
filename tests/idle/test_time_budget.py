import pytest

from tlt_trl.idle.time_budget import TimeBudget


class Clock:
    now_s = 10.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def rollout(budget, clock, seconds, spent=0.0, was_starved=False):
    """A rollout that ends now, `seconds` after the last one; returns what could be spent."""
    clock.now_s += seconds
    credit_s = budget.earn(rollout_started_s=clock.now_s - 1.0)
    clock.now_s += spent
    budget.spend(spent, was_starved)
    return credit_s


def test_a_share_of_the_time_between_two_rollouts(clock):
    budget = TimeBudget(0.1, clock)
    assert rollout(budget, clock, 50.0) == pytest.approx(0.1)  # nothing is known of the time before the first
    assert rollout(budget, clock, 50.0, spent=4.0) == pytest.approx(5.1)  # what is left is carried over
    assert rollout(budget, clock, 10.0) == pytest.approx(2.1)


def test_time_without_anything_to_train_on_does_not_come_back(clock):
    budget = TimeBudget(0.5, clock)
    rollout(budget, clock, 100.0, was_starved=True)
    rollout(budget, clock, 100.0, was_starved=True)
    assert rollout(budget, clock, 10.0) == pytest.approx(5.0)


def test_an_evaluation_earns_no_time(clock):
    budget = TimeBudget(0.5, clock)
    with budget.uncounted():  # before the first rollout
        clock.now_s += 600.0
    rollout(budget, clock, 1.0, spent=0.5)
    with budget.uncounted():
        clock.now_s += 600.0
    assert rollout(budget, clock, 4.0) == pytest.approx(2.0)


def test_evaluations_inside_an_evaluation_count_once(clock):
    budget = TimeBudget(0.5, clock)
    rollout(budget, clock, 1.0, spent=0.5)
    with budget.uncounted():
        for _ in range(2):
            with budget.uncounted():
                clock.now_s += 4.0
    assert rollout(budget, clock, 4.0) == pytest.approx(2.0)


def test_a_pause_between_two_runs_earns_no_time(clock):
    budget = TimeBudget(0.2, clock)
    rollout(budget, clock, 1.0, spent=0.2)
    clock.now_s += 30_000.0
    budget.start_run()
    assert rollout(budget, clock, 5.0) == pytest.approx(0.2)  # of the second since its own rollout began


def test_a_resumed_run_goes_on(clock):
    budget = TimeBudget(0.5, clock)
    rollout(budget, clock, 4.0, spent=0.1)
    clock.now_s += 3.0
    state = budget.state_dict()
    other_clock = Clock()
    other_clock.now_s = 1e6
    resumed = TimeBudget(0.5, other_clock)
    resumed.start_run()
    resumed.load_state_dict(state)
    assert rollout(resumed, other_clock, 2.0) == pytest.approx(rollout(budget, clock, 2.0))
