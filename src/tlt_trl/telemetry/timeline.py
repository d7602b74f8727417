"""
Records what every rank does and when: intervals in one JSONL file per rank, and a plot of them.

Intervals do not overlap: one that begins inside another interrupts it. Their number per training step is fixed: engine
steps and optimiser steps of the drafter have none. Each interval takes one short line and about ten microseconds.

A file holds all runs of an `output_dir` one after the other: a run that is resumed adds to it. Each begins with a line
that says which run of the folder it is, the same number on all ranks.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO


logger = logging.getLogger(__name__)

ROLLOUT = "rollout"
WEIGHT_SYNC = "weight sync"
WAITING = "waiting"
DRAFTER_TRAINING = "drafter training"
MERGING = "merging drafters"
GUESTS = "samples of other ranks"
SCORING = "scoring"
POLICY_TRAINING = "policy training"

COLORS = {
    ROLLOUT: "#4c78a8",
    WEIGHT_SYNC: "#9d755d",
    WAITING: "#d6d6d6",
    DRAFTER_TRAINING: "#54a24b",
    MERGING: "#b279a2",
    GUESTS: "#72b7b2",
    SCORING: "#eeca3b",
    POLICY_TRAINING: "#f58518",
}


class Timeline:
    """
    Writes the intervals of one rank.

    Times count from a zero that is common to all ranks to within `zero_error_s`. No rank leaves a barrier before all
    have entered it, so two ranks leave it no further apart than the longer of their two stays. The first barrier waits
    for late ranks, so the second one is short. The clocks are monotonic; those of two machines drift apart by about
    ten microseconds per second.

    Args:
        folder (`Path`):
            Folder of `rank_<rank>.jsonl`, which is added to. All ranks can use the same folder, also on a shared file
            system.
        rank (`int`):
            This rank.
        num_ranks (`int`):
            Number of ranks.
        barrier (`Callable[[], None]`):
            Returns when all ranks have called it, such as `accelerator.wait_for_everyone`.
        clock (`Callable[[], float]`, *optional*, defaults to `time.perf_counter`):
            Monotonic clock in seconds.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        num_ranks: int,
        barrier: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank_{rank}.jsonl"
        run = 1 + _runs_so_far(folder)  # before the barrier, after which the first rank adds one
        has_half_a_line = path.exists() and not path.read_bytes().endswith(b"\n")  # of a rank that was killed
        # Written line by line, so that the file also shows what a rank did before it was killed.
        self._file: TextIO | None = path.open("a", buffering=1)
        if has_half_a_line:
            self._file.write("\n")
        self._clock = clock
        self._open: list[str] = []  # names of the intervals that have begun, the innermost last
        self._begun_s = 0.0
        self.step = 0  # written with every interval
        barrier()
        entered = clock()
        barrier()
        self._zero = clock()
        self.zero_error_s = self._zero - entered
        self._write({"run": run, "rank": rank, "num_ranks": num_ranks, "zero_error_s": self.zero_error_s})

    @classmethod
    def of_run(cls, output_dir: str | os.PathLike, accelerator: Any) -> "Timeline":
        """Timeline of a process of a training run, in `timeline` inside its `output_dir`."""
        folder = Path(output_dir) / "timeline"
        return cls(folder, accelerator.process_index, accelerator.num_processes, accelerator.wait_for_everyone)

    @contextmanager
    def interval(self, name: str) -> Iterator[None]:
        """An interval named by one of the constants of this module; it interrupts the interval around it."""
        self._cut()
        self._open.append(name)
        try:
            yield
        finally:
            self._cut()
            self._open.pop()

    def _cut(self) -> None:
        now = self._clock() - self._zero
        if self._open:
            self._write({"name": self._open[-1], "step": self.step, "start_s": self._begun_s, "end_s": now})
        self._begun_s = now

    def _write(self, row: dict) -> None:
        if self._file is None:
            return
        row = {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}
        try:
            self._file.write(json.dumps(row) + "\n")
        except OSError as error:  # such as a full disk, which must not end the run
            logger.warning("The timeline ends here: %s: %s", self._file.name, error)
            self._file = None


class NoTimeline:
    """A [`Timeline`] that notes nothing."""

    step = 0

    def interval(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class Interval:
    """A line of a timeline file; seconds since the common zero."""

    name: str
    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class RankTimeline:
    rank: int
    num_ranks: int
    zero_error_s: float
    intervals: list[Interval]


def read_timelines(folder: Path, last_run_only: bool = False) -> list[RankTimeline]:
    """
    Timelines of all ranks, in rank order. The runs of a folder follow each other without the pauses between them;
    `num_ranks` is that of the last one.

    Args:
        folder (`Path`):
            Folder of a [`Timeline`].
        last_run_only (`bool`, *optional*, defaults to `False`):
            Whether to leave out all runs but the last one.

    Raises:
        `FileNotFoundError`: When the folder holds none.
    """
    runs_of_ranks = [_read_runs(path) for path in folder.glob("rank_*.jsonl")]
    runs_of_ranks = [runs for runs in runs_of_ranks if runs]
    if not runs_of_ranks:
        raise FileNotFoundError(
            f"{folder} holds no rank_<n>.jsonl. A run writes them to <output_dir>/timeline with `log_timeline=True`."
        )
    if last_run_only:
        last = max(max(runs) for runs in runs_of_ranks)
        runs_of_ranks = [{last: runs[last]} for runs in runs_of_ranks if last in runs]
    starts_s = _starts_s(runs_of_ranks)
    timelines = [_joined(runs, starts_s) for runs in runs_of_ranks]
    return sorted(timelines, key=lambda timeline: timeline.rank)


def _read_runs(path: Path) -> dict[int, RankTimeline]:
    """The runs in the file of a rank, by their number; times count from the start of each."""
    runs: dict[int, RankTimeline] = {}
    for line in path.read_text().splitlines():
        if not line.endswith("}"):
            continue  # a rank that was killed can leave half a line
        row = json.loads(line)
        if "num_ranks" in row:
            number = row.pop("run", 1)  # files of the first versions hold one run
            current = runs[number] = RankTimeline(**row, intervals=[])
        else:
            current.intervals.append(Interval(**row))
    return runs


def _runs_so_far(folder: Path) -> int:
    """The number of the last run in a folder; the first rank is part of every run, and others may be new."""
    path = folder / "rank_0.jsonl"
    return max(_read_runs(path), default=0) if path.exists() else 0


def _starts_s(runs_of_ranks: list[dict[int, RankTimeline]]) -> dict[int, float]:
    """When each run begins, if all ranks' runs follow each other without a pause."""
    starts_s, now_s = {}, 0.0
    for number in sorted(set().union(*runs_of_ranks)):
        starts_s[number] = now_s
        now_s += max(
            (i.end_s for runs in runs_of_ranks if number in runs for i in runs[number].intervals), default=0.0
        )
    return starts_s


def _joined(runs: dict[int, RankTimeline], starts_s: dict[int, float]) -> RankTimeline:
    last = runs[max(runs)]
    intervals = [
        replace(interval, start_s=interval.start_s + starts_s[number], end_s=interval.end_s + starts_s[number])
        for number in sorted(runs)
        for interval in runs[number].intervals
    ]
    return replace(last, zero_error_s=max(run.zero_error_s for run in runs.values()), intervals=intervals)


def seconds_by_name(timeline: RankTimeline) -> dict[str, float]:
    """Total seconds of every kind of interval."""
    seconds: dict[str, float] = {}
    for interval in timeline.intervals:
        seconds[interval.name] = seconds.get(interval.name, 0.0) + interval.end_s - interval.start_s
    return seconds


def draw_timelines(
    timelines: list[RankTimeline], output: Path, first_s: float = 0.0, last_s: float | None = None
) -> None:
    """
    Draws a picture with one bar per rank; the suffix of `output` determines the file type.

    Args:
        timelines (`list[RankTimeline]`):
            What [`read_timelines`] returns.
        output (`Path`):
            File to write, such as `timeline.png`.
        first_s, last_s (`float`, *optional*):
            Part to draw. Defaults to everything.

    Raises:
        `RuntimeError`: When matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise RuntimeError("Drawing needs matplotlib: pip install 'tlt-trl[bench]'.") from error

    last_s = max(i.end_s for t in timelines for i in t.intervals) if last_s is None else last_s
    figure = Figure(figsize=(11, 1.3 + 0.45 * len(timelines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, timeline in enumerate(timelines):
        for name, color in COLORS.items():
            spans = [
                (i.start_s, i.end_s - i.start_s)
                for i in timeline.intervals
                if i.name == name and i.end_s > first_s and i.start_s < last_s
            ]
            axes.broken_barh(spans, (row - 0.4, 0.8), color=color, linewidth=0)
    axes.set_xlim(first_s, last_s)
    axes.set_yticks(range(len(timelines)), [f"rank {timeline.rank}" for timeline in timelines])
    axes.invert_yaxis()
    error_ms = 1000 * max(timeline.zero_error_s for timeline in timelines)
    axes.set_xlabel(f"seconds since the start (rank clocks aligned to within {error_ms:.1f} ms)")
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(COLORS), frameon=False, fontsize=9)
    figure.savefig(output, dpi=110)
