import time

from tlt_trl.idle.spot_training import MAX_STEP_S, train_until_all_finished


class ScriptedWait:
    """The last rank finishes after `seconds`."""

    def __init__(self, seconds):
        self.ends_s = time.perf_counter() + seconds
        self.finished_at_s = None
        self.joined = False

    def all_finished(self):
        if time.perf_counter() >= self.ends_s:
            self.finished_at_s = self.ends_s
        return self.finished_at_s is not None

    def join(self):
        time.sleep(max(0.0, self.ends_s - time.perf_counter()))
        self.finished_at_s = self.ends_s
        self.joined = True


class ScriptedTrainer:
    def __init__(self, step_s, has_data=True):
        self.step_s, self.has_data, self.max_step_s = step_s, has_data, None

    def train_for(self, seconds_budget, stop, max_step_s):
        self.max_step_s = max_step_s
        started, steps = time.perf_counter(), 0.0
        while self.has_data and not stop():
            time.sleep(self.step_s)
            steps += 1
        return {"steps": steps, "seconds": time.perf_counter() - started, "tokens": steps}


def test_trains_through_the_whole_wait_and_stops_after_one_step():
    wait, trainer = ScriptedWait(0.5), ScriptedTrainer(step_s=0.02)
    report = train_until_all_finished(trainer, wait)
    assert wait.joined and trainer.max_step_s == MAX_STEP_S
    assert report["steps"] >= 10
    assert report["idle_used_fraction"] > 0.9
    assert 0.0 <= report["stop_latency_s"] < 0.1


def test_without_data_it_only_waits():
    wait = ScriptedWait(0.2)
    report = train_until_all_finished(ScriptedTrainer(0.02, has_data=False), wait)
    assert wait.joined and report["steps"] == 0
    assert report["idle_s"] > 0.15 and report["idle_used_fraction"] < 0.05
    assert report["stop_latency_s"] == 0.0


def test_the_last_rank_does_not_train():
    wait = ScriptedWait(-1.0)
    report = train_until_all_finished(ScriptedTrainer(0.02), wait)
    assert report["steps"] == 0 and report["idle_s"] == 0.0
