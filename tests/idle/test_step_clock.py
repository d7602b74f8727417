import pytest

from tlt_trl.idle.step_clock import StepClock


class Clock:
    now_s = 10.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def lap(steps, clock, seconds):
    clock.now_s += seconds
    return steps.lap()


def test_from_lap_to_lap(clock):
    steps = StepClock(clock)
    clock.now_s += 50.0
    steps.start()  # nothing is known of the time before the first rollout
    assert lap(steps, clock, 3.0) == 3.0
    steps.start()
    assert lap(steps, clock, 4.0) == 4.0


def test_without_a_start_nothing_has_passed(clock):
    assert lap(StepClock(clock), clock, 3.0) == 0.0


def test_an_evaluation_does_not_count(clock):
    steps = StepClock(clock)
    with steps.uncounted():  # before the first rollout
        clock.now_s += 600.0
    steps.start()
    lap(steps, clock, 1.0)
    with steps.uncounted():
        clock.now_s += 600.0
    assert lap(steps, clock, 4.0) == 4.0


def test_evaluations_inside_an_evaluation_count_once(clock):
    steps = StepClock(clock)
    steps.start()
    with steps.uncounted():
        for _ in range(2):
            with steps.uncounted():
                clock.now_s += 4.0
    assert lap(steps, clock, 4.0) == 4.0


def test_a_pause_between_two_runs_does_not_count(clock):
    steps = StepClock(clock)
    steps.start()
    lap(steps, clock, 1.0)
    clock.now_s += 30_000.0
    steps.start_run()
    steps.start()
    assert lap(steps, clock, 5.0) == 5.0


def test_a_resumed_run_goes_on(clock):
    steps = StepClock(clock)
    steps.start()
    lap(steps, clock, 4.0)
    clock.now_s += 3.0
    state = steps.state_dict()
    other_clock = Clock()
    other_clock.now_s = 1e6
    resumed = StepClock(other_clock)
    resumed.start_run()
    resumed.load_state_dict(state)
    assert lap(resumed, other_clock, 2.0) == lap(steps, clock, 2.0) == 5.0


def test_what_is_saved_inside_an_uncounted_time_does_not_contain_it(clock):
    step_clock, resumed = StepClock(clock), StepClock(clock)
    step_clock.start()
    clock.now_s += 2.0
    with step_clock.uncounted():
        clock.now_s += 600.0
        resumed.load_state_dict(step_clock.state_dict())
    clock.now_s += 2.0
    assert step_clock.lap() == resumed.lap() == 4.0
