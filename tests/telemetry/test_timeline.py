import builtins
import json

import pytest

from tlt_trl.telemetry.timeline import (
    DRAFTER_TRAINING,
    ROLLOUT,
    WAITING,
    Timeline,
    draw_timelines,
    read_timelines,
    seconds_by_name,
)
from tlt_trl.tools.cli import main


class ScriptedClock:
    def __init__(self, start_s=100.0):
        self.now_s = start_s

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def make(folder, rank=0, barrier_s=0.002):
    clock = ScriptedClock()
    return Timeline(folder, rank, 2, lambda: clock.sleep(barrier_s), clock), clock


def test_intervals_interrupt_each_other_and_share_a_zero(tmp_path):
    timeline, clock = make(tmp_path)
    clock.sleep(1.0)
    with timeline.interval(ROLLOUT):
        clock.sleep(2.0)
        timeline.step = 3
        with timeline.interval(WAITING):
            clock.sleep(0.5)
            with timeline.interval(DRAFTER_TRAINING):
                clock.sleep(4.0)
        clock.sleep(0.25)
    (read,) = read_timelines(tmp_path)
    assert (read.rank, read.num_ranks, read.zero_error_s) == (0, 2, 0.002)
    pieces = [(i.name, i.start_s, i.end_s) for i in read.intervals if i.end_s > i.start_s]
    assert pieces == [
        (ROLLOUT, 1.0, 3.0),
        (WAITING, 3.0, 3.5),
        (DRAFTER_TRAINING, 3.5, 7.5),
        (ROLLOUT, 7.5, 7.75),
    ]
    assert read.intervals[-1].step == 3
    assert seconds_by_name(read) == {ROLLOUT: 2.25, WAITING: 0.5, DRAFTER_TRAINING: 4.0}


def test_an_exception_closes_the_interval(tmp_path):
    timeline, clock = make(tmp_path)
    with pytest.raises(KeyError), timeline.interval(ROLLOUT):
        clock.sleep(1.0)
        raise KeyError
    clock.sleep(1.0)
    with timeline.interval(WAITING):
        clock.sleep(1.0)
    assert seconds_by_name(read_timelines(tmp_path)[0]) == {ROLLOUT: 1.0, WAITING: 1.0}


def test_half_a_line_of_a_killed_rank_is_left_out(tmp_path):
    timeline, clock = make(tmp_path)
    with timeline.interval(ROLLOUT):
        clock.sleep(1.0)
    with (tmp_path / "rank_0.jsonl").open("a") as file:
        file.write('{"name": "wait')
    assert len(read_timelines(tmp_path)[0].intervals) == 1


@pytest.fixture
def two_ranks(tmp_path):
    for rank in (1, 0):
        timeline, clock = make(tmp_path, rank)
        with timeline.interval(ROLLOUT):
            clock.sleep(1.0 + rank)
    return tmp_path


def test_command_draws_and_sums_up(two_ranks, capsys):
    picture = two_ranks / "timeline.png"
    assert main(["timeline", str(two_ranks), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["rank"], row["seconds"]) for row in rows] == [(0, {ROLLOUT: 1.0}), (1, {ROLLOUT: 2.0})]


def test_command_says_what_is_missing(tmp_path, capsys):
    assert main(["timeline", str(tmp_path)]) == 1
    assert "log_timeline=True" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(two_ranks, monkeypatch):
    original = builtins.__import__

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(RuntimeError, match=r"pip install 'tlt-trl\[bench\]'"):
        draw_timelines(read_timelines(two_ranks), two_ranks / "timeline.png")
