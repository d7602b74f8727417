"""Kind of fault: clocks, step numbers and files that outlive a run."""

import json
import subprocess
import sys
import threading

import pytest
from tests.conftest import ROOT, environment_of_its_own, save_tiny_policy

from tlt_trl.telemetry.timeline import ROLLOUT, SCORING, Timeline, read_timelines, seconds_by_name
from tlt_trl.tools.cli import main


MAX_AGE = 4  # rollouts, of one step each


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What three runs of one trainer did: the first, another one, and one that goes on from step 3 of that."""
    folder = tmp_path_factory.mktemp("clocks")
    policy_dir = save_tiny_policy(folder / "policy", vocab_size=64, num_layers=2)
    script = [str(ROOT / "tests" / "faults" / "clock_script.py"), policy_dir, str(folder / "run")]
    done = subprocess.run(
        [sys.executable, *script], cwd=ROOT, env=environment_of_its_own(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(result.removeprefix("RESULT"))


@pytest.mark.engine
class TestRunsOfOneTrainer:
    def test_every_run_counts_its_own_time_only(self, runs):
        for run in runs:
            # The reward of a training batch and a rollout, but neither the pause (30 s) nor an evaluation of two sets
            # (8 s), a prediction (4 s, after the second step) or a save (20 s, after the third).
            assert run["counted_s"] and all(1.0 < seconds < 3.0 for seconds in run["counted_s"]), run["counted_s"]

    def test_every_run_trains_its_drafter(self, runs):
        assert all(run["drafter_steps"] > 0 for run in runs)

    def test_a_buffer_takes_the_samples_of_every_run(self, runs):
        for run in runs:
            for ages in run["ages"]:
                assert ages.count(0) == 8, ages  # all of this step's
                assert all(0 <= age <= MAX_AGE for age in ages)

    def test_what_a_run_left_is_older_than_what_the_next_one_adds(self, runs):
        first, second, _ = (run["ages"] for run in runs)
        assert set(first[0]) == {0} and set(second[0]) > {0, 1}


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def record(folder, names, num_ranks=1, seconds=1.0):
    """A run whose ranks do so, one interval each, in as many threads."""
    barrier = threading.Barrier(num_ranks)

    def one_rank(rank):
        clock = Clock()
        timeline = Timeline(folder, rank, num_ranks, barrier.wait, clock)
        for name in names:
            with timeline.interval(name):
                clock.now_s += seconds + rank

    threads = [threading.Thread(target=one_rank, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class TestTimelineOfAResumedRun:
    def test_it_adds_to_what_is_there(self, tmp_path):
        record(tmp_path, [ROLLOUT, SCORING])
        before = (tmp_path / "rank_0.jsonl").read_text()
        record(tmp_path, [ROLLOUT])
        assert (tmp_path / "rank_0.jsonl").read_text().startswith(before)
        (timeline,) = read_timelines(tmp_path)
        assert [(i.name, i.start_s, i.end_s) for i in timeline.intervals] == [
            (ROLLOUT, 0.0, 1.0),
            (SCORING, 1.0, 2.0),
            (ROLLOUT, 2.0, 3.0),
        ]

    def test_its_ranks_begin_together(self, tmp_path):
        for _ in range(2):
            record(tmp_path, [ROLLOUT], num_ranks=2)
        assert [[i.start_s for i in timeline.intervals] for timeline in read_timelines(tmp_path)] == [[0.0, 2.0]] * 2

    def test_on_more_ranks_than_before(self, tmp_path):
        record(tmp_path, [ROLLOUT])
        record(tmp_path, [SCORING], num_ranks=2)
        first, second = read_timelines(tmp_path)
        assert [(i.name, i.start_s) for i in first.intervals] == [(ROLLOUT, 0.0), (SCORING, 1.0)]
        assert [(i.name, i.start_s) for i in second.intervals] == [(SCORING, 1.0)] and second.num_ranks == 2

    def test_after_a_rank_that_was_killed_in_the_middle_of_a_line(self, tmp_path):
        record(tmp_path, [ROLLOUT])
        with (tmp_path / "rank_0.jsonl").open("a") as file:
            file.write('{"name": "wait')
        record(tmp_path, [SCORING])
        assert seconds_by_name(read_timelines(tmp_path)[0]) == {ROLLOUT: 1.0, SCORING: 1.0}

    def test_the_last_run_alone(self, tmp_path):
        record(tmp_path, [ROLLOUT], num_ranks=2)
        record(tmp_path, [SCORING])
        (timeline,) = read_timelines(tmp_path, last_run_only=True)
        assert [(i.name, i.start_s) for i in timeline.intervals] == [(SCORING, 0.0)]

    def test_the_command_sums_up_all_of_it(self, tmp_path, capsys):
        for _ in range(2):
            record(tmp_path, [ROLLOUT])
        assert main(["timeline", str(tmp_path)]) == 0
        assert json.loads(capsys.readouterr().out)["seconds"] == {ROLLOUT: 2.0}
