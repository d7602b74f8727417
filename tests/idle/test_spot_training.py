import time

import pytest
import torch

from tlt_trl.drafter import DrafterTrainer, DrafterTrainingArguments
from tlt_trl.drafter.training_report import TrainingReport
from tlt_trl.idle.spot_training import (
    MAX_STEP_S,
    BackgroundTraining,
    train_safely,
    train_until_all_finished,
)


TARGET = ("embedding", "head")


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    """Time passes where a test lets it."""
    clock = Clock()
    monkeypatch.setattr("tlt_trl.idle.spot_training.time.perf_counter", clock)
    return clock


class ScriptedWait:
    """The last rank finishes after `seconds`."""

    def __init__(self, clock, seconds):
        self.clock = clock
        self.ends_s = clock() + seconds
        self.finished_at_s = None
        self.joined = False

    def all_finished(self):
        if self.clock() >= self.ends_s:
            self.finished_at_s = self.ends_s
        return self.finished_at_s is not None

    def join(self):
        self.clock.now_s = max(self.clock.now_s, self.ends_s)
        self.finished_at_s = self.ends_s
        self.joined = True


class ScriptedTrainer:
    def __init__(self, clock, step_s, has_data=True):
        self.clock, self.step_s, self.has_data, self.max_step_s = clock, step_s, has_data, None

    def set_policy(self, embedding, head):
        assert (embedding, head) == TARGET

    def end_period(self):
        pass

    def train_for(self, budget_s, stop, max_step_s):
        self.max_step_s = max_step_s
        steps = 0
        while self.has_data and not stop():
            self.clock.now_s += self.step_s
            steps += 1
        seconds = steps * self.step_s
        return TrainingReport(steps=steps, time_s=seconds, step_time_s=seconds, tokens=steps)


class ScriptedGuests:
    """Two samples of other ranks come, each of which runs for a tenth of a second."""

    def __init__(self, clock, arrivals_s):
        self.clock, self.arrivals_s, self.log = clock, list(arrivals_s), []

    def stand_by(self):
        self.log.append("stand by")

    def has_work(self):
        return bool(self.arrivals_s) and self.clock.now_s >= self.arrivals_s[0]

    def serve(self):
        self.arrivals_s.pop(0)
        self.log.append("serve")
        self.clock.now_s += 0.125

    def rest(self):
        self.log.append("rest")
        self.clock.now_s += 0.0625


def test_samples_of_other_ranks_come_first_and_do_not_count_as_waited(clock):
    wait, trainer = ScriptedWait(clock, 1.0), ScriptedTrainer(clock, step_s=0.0625)
    guests = ScriptedGuests(clock, [clock() + 0.25, clock() + 0.5])
    report = train_until_all_finished(trainer, wait, TARGET, guests=guests)
    assert guests.log == ["stand by", "serve", "serve"] and wait.joined
    assert report.steps == 4 + 2 + 6
    assert (report.idle_s, report.idle_used_s) == (0.75, 0.75)


def test_a_rank_with_nothing_to_train_on_waits_for_samples_of_others(clock):
    wait, trainer = ScriptedWait(clock, 0.5), ScriptedTrainer(clock, step_s=0.0625, has_data=False)
    guests = ScriptedGuests(clock, [clock() + 0.125])
    train_until_all_finished(trainer, wait, TARGET, guests=guests)
    assert guests.log == ["stand by", "rest", "rest", "serve", "rest", "rest", "rest", "rest"]


def test_trains_through_the_whole_wait_and_stops_after_one_step(clock):
    wait, trainer = ScriptedWait(clock, 0.5), ScriptedTrainer(clock, step_s=0.0625)
    report = train_until_all_finished(trainer, wait, TARGET)
    assert wait.joined and trainer.max_step_s == MAX_STEP_S
    assert (report.steps, report.idle_s, report.idle_used_s, report.stop_latency_s) == (8, 0.5, 0.5, 0.0)


def test_what_outlives_the_wait_is_not_idle_time(clock):
    report = train_until_all_finished(ScriptedTrainer(clock, step_s=0.375), ScriptedWait(clock, 0.5), TARGET)
    assert (report.steps, report.idle_s, report.idle_used_s, report.stop_latency_s) == (2, 0.5, 0.5, 0.25)


def test_without_data_it_only_waits(clock):
    wait = ScriptedWait(clock, 0.25)
    report = train_until_all_finished(ScriptedTrainer(clock, 0.02, has_data=False), wait, TARGET)
    assert wait.joined and report.steps == 0
    assert (report.idle_s, report.idle_used_s, report.stop_latency_s) == (0.25, 0.0, 0.0)


def test_the_last_rank_does_not_train(clock):
    report = train_until_all_finished(ScriptedTrainer(clock, 0.02), ScriptedWait(clock, -1.0), TARGET)
    assert report.steps == 0 and report.idle_s == 0.0


class FailingTrainer(ScriptedTrainer):
    def __init__(self, clock):
        super().__init__(clock, 0.01)
        self.restored = self.ended = False

    def train_for(self, budget_s, stop, max_step_s):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def restore_good_state(self):
        self.restored = True

    def end_period(self):
        self.ended = True


def test_an_exception_ends_the_training_and_not_the_run(clock, caplog):
    wait, trainer = ScriptedWait(clock, 0.2), FailingTrainer(clock)
    report = train_until_all_finished(trainer, wait, TARGET)
    assert wait.joined and trainer.restored and trainer.ended
    assert report.failures == 1.0 and report.tokens == report.steps == 0.0
    assert "CUDA out of memory" in caplog.text  # with its traceback


class TestFaultsOfTheRealTrainer:
    @pytest.fixture
    def trainer(self, make_drafter, fill_buffer):
        args = DrafterTrainingArguments(unroll_steps=3, autocast_dtype=torch.float32)
        return DrafterTrainer(make_drafter(), fill_buffer(), args)

    @pytest.fixture
    def target(self, policy):
        return policy.get_input_embeddings().weight.detach(), policy.get_output_embeddings().weight.detach()

    def state(self, trainer):
        optimizer = trainer.optimizer.state_dict()["state"]
        moments = [optimizer[i][name] for i in sorted(optimizer) for name in sorted(optimizer[i])]
        return [tensor.detach().clone() for tensor in (*trainer.drafter.parameters(), *moments)]

    def test_out_of_memory_in_the_middle_restores_weights_and_optimizer(self, trainer, target, monkeypatch):
        train_safely(trainer, target, budget_s=0.2)
        before, counters = self.state(trainer), (trainer.steps, trainer.tokens_trained)
        assert trainer.steps > 0
        step = trainer.step

        def third_step_fails(*args):
            if trainer.steps == counters[0] + 2:
                raise torch.OutOfMemoryError("out of memory")
            return step(*args)

        monkeypatch.setattr(trainer, "step", third_step_fails)
        report = train_safely(trainer, target, budget_s=5.0)
        assert report.failures == 1.0 and report.tokens == 0.0
        assert all(map(torch.equal, before, self.state(trainer)))
        assert (trainer.steps, trainer.tokens_trained) == counters
        monkeypatch.undo()
        assert train_safely(trainer, target, budget_s=0.2).steps > 0

    def test_a_fault_before_the_first_step_leaves_what_was_merged(self, trainer, target):
        train_safely(trainer, target, budget_s=0.1)
        with torch.no_grad():  # a merge
            trainer.drafter.fc.weight.add_(1.0)
        merged = self.state(trainer)
        report = train_safely(trainer, (target[0], torch.zeros(3, 3)), budget_s=0.1)
        assert report.failures == 1.0
        assert all(map(torch.equal, merged, self.state(trainer)))

    def test_losses_that_are_not_finite_change_nothing_and_end_the_period(self, trainer, target):
        train_safely(trainer, target, budget_s=0.1)
        before = self.state(trainer)
        report = train_safely(trainer, (target[0], torch.full_like(target[1], float("nan"))), budget_s=30.0)
        assert report.dropped_batches == 3.0 and report.steps == 0.0
        assert all(map(torch.equal, before, self.state(trainer)))

    def test_a_step_is_abandoned_as_soon_as_it_is_told_to_stop(self, trainer, target):
        answers = []

        def stop():
            answers.append(len(answers) >= 30)
            return answers[-1]

        report = train_safely(trainer, target, stop=stop, max_step_s=MAX_STEP_S)
        assert report.steps > 0 and report.steps == trainer.steps
        assert answers.count(True) <= 2  # inside the step, and between two of them
        assert all(parameter.grad is None for parameter in trainer.drafter.parameters())


class TestBackgroundTraining:
    def make(self, trainer, target):
        reports = []
        background = BackgroundTraining(
            lambda stop: train_safely(trainer, target, stop=stop, max_step_s=MAX_STEP_S), reports.append
        )
        return background, reports

    @pytest.fixture
    def trainer(self, make_drafter, fill_buffer):
        return DrafterTrainer(make_drafter(), fill_buffer(), DrafterTrainingArguments(unroll_steps=3))

    @pytest.fixture
    def target(self, policy):
        return policy.get_input_embeddings().weight.detach(), policy.get_output_embeddings().weight.detach()

    def test_trains_beside_and_stops_in_time(self, trainer, target):
        background, reports = self.make(trainer, target)
        before = torch.get_rng_state()
        with background.running(), torch.no_grad():  # the thread has gradients of its own
            time.sleep(0.5)
        assert torch.equal(torch.get_rng_state(), before)
        (report,) = reports
        assert trainer.steps == report.steps > 0
        assert 0.0 < report.idle_used_s <= report.idle_s

    def test_does_not_train_while_it_is_paused(self, trainer, target):
        background, reports = self.make(trainer, target)
        with background.paused():
            pass
        assert not reports and trainer.steps == 0
        with background.running():
            time.sleep(0.2)
            with background.paused():
                steps = trainer.steps
                time.sleep(0.2)
                assert trainer.steps == steps > 0
            time.sleep(0.2)
        assert len(reports) == 2 and trainer.steps > steps

    def test_the_waits_own_exception_comes_through(self, trainer, target):
        background, reports = self.make(trainer, target)
        with pytest.raises(KeyError), background.running():
            raise KeyError("reward")
        assert len(reports) == 1
        with background.running():  # usable again
            pass

    def test_a_failure_in_the_thread_is_reported(self, trainer, target):
        background, reports = self.make(trainer, (target[0], torch.zeros(2, 2)))
        with background.running():
            time.sleep(0.3)
        assert reports[0].failures == 1.0

    def test_short_waits_are_left_alone(self):
        reports = []
        background = BackgroundTraining(lambda stop: 1 / 0, reports.append)
        with background.running():
            time.sleep(0.001)
        assert reports[0].failures == reports[0].steps == reports[0].idle_used_s == 0.0

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
    def test_a_thread_that_dies_does_not_hide_the_error_beside_it(self):
        reports = []
        background = BackgroundTraining(lambda stop: 1 / 0, reports.append)
        with pytest.raises(KeyError), background.running():
            time.sleep(0.3)
            raise KeyError("reward")
        assert reports[0].failures == 1.0 and reports[0].steps == 0.0
