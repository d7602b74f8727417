"""
Records what every rank does and when: intervals in one JSONL file per rank, and a plot of them.

Intervals do not overlap: one that begins inside another interrupts it. Their number per training step is fixed: engine
steps and optimiser steps of the drafter have none. Each interval takes one short line and about ten microseconds.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
            Folder of `rank_<rank>.jsonl`, which is replaced. All ranks can use the same folder, also on a shared file
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
        # Written line by line, so that the file also shows what a rank did before it was killed.
        self._file = (folder / f"rank_{rank}.jsonl").open("w", buffering=1)
        self._clock = clock
        self._open: list[str] = []  # names of the intervals that have begun, the innermost last
        self._begun_s = 0.0
        self.step = 0  # written with every interval
        barrier()
        entered = clock()
        barrier()
        self._zero = clock()
        self.zero_error_s = self._zero - entered
        self._write({"rank": rank, "num_ranks": num_ranks, "zero_error_s": self.zero_error_s})

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
        row = {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}
        self._file.write(json.dumps(row) + "\n")


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


def read_timelines(folder: Path) -> list[RankTimeline]:
    """
    Timelines of all ranks, in rank order.

    Raises:
        `FileNotFoundError`: When the folder holds none.
    """
    timelines = []
    for path in folder.glob("rank_*.jsonl"):
        lines = path.read_text().splitlines()
        # A rank that was killed can leave half a line at the end.
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        timelines.append(RankTimeline(**rows[0], intervals=[Interval(**row) for row in rows[1:]]))
    if not timelines:
        raise FileNotFoundError(
            f"{folder} holds no rank_<n>.jsonl. A run writes them to <output_dir>/timeline with `log_timeline=True`."
        )
    return sorted(timelines, key=lambda timeline: timeline.rank)


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
