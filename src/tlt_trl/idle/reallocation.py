"""
Which unfinished samples should move to another rank, after RLHFSpec (arXiv 2512.04752), which publishes the idea and
no rule; the rule here is our own.

Nobody knows how long a sample will get. What is known is how many tokens earlier samples had when they ended, so every
sample has a probability of still running after so many more tokens, and a rank an expected number of running samples:

    running(t)  = sum of P(length > tokens so far + t | length > tokens so far)      over its samples
    seconds     = integral of step(running(t)) dt          step: seconds in which all running samples gain a token

`step` is flat up to a knee and linear beyond it. A rank whose samples fit below the knee gains nothing by giving one
away, and a rank below the knee takes one for nothing.

Every rank describes itself by a few numbers ([`RankState`]), and the plan says how many samples go from which rank to
which. It is a function of those numbers alone, so all ranks compute the same plan and nobody is in charge. Which of
its samples go, a rank decides by itself ([`in_order_of_moving`]).
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


# Points at which the expected number of running samples is published.
NUM_POINTS = 16
# A plan must shorten the longest rank's time by this share of it. In the simulation of 1 024 ranks, 5 % leaves twice
# as much between the makespan and a perfect split, and 2 % moves an eighth more samples for half a percent.
MIN_GAIN_SHARE = 0.025
# Tokens that a sample must be expected to gain still: moving one costs a prefill.
MIN_REMAINING_TOKENS = 64
# Earlier samples of all prompts weigh as much as so many finished samples of the same prompt.
RUN_WEIGHT = 4.0
# Lengths that are remembered.
MAX_LENGTHS = 4096
# Numbers by which a rank describes itself.
ROW_NUMBERS = 2 * NUM_POINTS + 6


def horizons(max_tokens: int) -> np.ndarray:
    """Tokens from now on at which ranks compare themselves, of shape (NUM_POINTS,); dense where most samples end."""
    return np.concatenate([[0.0], np.geomspace(min(8.0, max_tokens / 2), max_tokens, NUM_POINTS - 1)])


@dataclass(frozen=True, slots=True)
class StepTime:
    """
    Seconds in which every running sample gains a token.

    Args:
        floor_s (`float`):
            Of a batch of at most `knee` samples.
        knee (`float`):
            Largest batch that costs no more than a single sample.
        per_sample_s (`float`):
            Of every further sample.
    """

    floor_s: float
    knee: float
    per_sample_s: float

    def seconds(self, running: np.ndarray) -> np.ndarray:
        """For expected numbers of running samples; less than one counts as the probability that there is one."""
        beyond = self.per_sample_s * np.maximum(running - self.knee, 0.0)
        return self.floor_s * np.minimum(running, 1.0) + beyond

    @classmethod
    def fit(cls, batch_sizes: Sequence[float], seconds: Sequence[float]) -> "StepTime":
        """The two pieces with the smallest relative squared error; the knee is one of the batch sizes."""
        batches, measured = np.asarray(batch_sizes, dtype=float), np.asarray(seconds, dtype=float)
        knees = np.unique(batches)
        beyond = np.maximum(batches - knees[:, None], 0.0)  # shape (knees, rows)
        weights = 1.0 / np.square(measured)
        # Normal equations of floor + slope * beyond, for all knees at once.
        total, first, second = weights.sum(), beyond @ weights, np.square(beyond) @ weights
        ones, cross = (weights * measured).sum(), beyond @ (weights * measured)
        determinant = total * second - first * first
        slope = np.divide(
            total * cross - first * ones, determinant, out=np.zeros(len(knees)), where=determinant > 1e-9 * total**2
        )
        slope = np.maximum(slope, 0.0)
        floor = (ones - slope * first) / total
        errors = (np.square(floor[:, None] + slope[:, None] * beyond - measured) * weights).sum(1)
        best = int(np.flatnonzero(errors <= errors.min() + 1e-12)[0])
        return cls(float(floor[best]), float(knees[best]), float(slope[best]))


class StepTimes:
    """Measured [`StepTime`] of one rank: a running mean of every batch size that was seen."""

    # Weight of a new step.
    NEW = 0.1
    # A single sample is taken to be so much faster than the smallest batch seen. Without a guess nobody would ever
    # find out: a rank whose samples all run to the end sees one batch size only.
    SINGLE = 0.75

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, batch_size: int, seconds_per_token: float) -> None:
        """A step in which every one of so many samples gained a token in this time."""
        earlier = self._seconds.get(batch_size, seconds_per_token)
        self._seconds[batch_size] = earlier + self.NEW * (seconds_per_token - earlier)

    def fit(self) -> StepTime | None:
        """`None` before the first step."""
        if not self._seconds:
            return None
        rows = dict(self._seconds)
        smallest = min(rows)
        if smallest > 1:
            rows[1] = self.SINGLE * rows[smallest]
        return StepTime.fit(list(rows), list(rows.values()))


@dataclass(frozen=True, slots=True)
class RunningSample:
    """
    An unfinished sample of a rank.

    Args:
        key (`str`):
            Its name.
        group (`Hashable`):
            What samples of the same prompt share.
        tokens (`int`):
            Tokens sampled so far.
        context_tokens (`int`):
            Tokens of prompt and answer.
        movable (`bool`, *optional*, defaults to `True`):
            Whether it may leave.
    """

    key: str
    group: Hashable
    tokens: int
    context_tokens: int
    movable: bool = True


class LengthSurvival:
    """
    How long samples get, from those of this run that have ended.

    A sample of unlimited length is added to those seen, so that what is longer than all of them is expected to go on
    to the limit: the longer a sample is, the more it has to go.

    Args:
        max_tokens (`int`):
            Largest number of tokens of an answer.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens = max_tokens
        self._lengths: list[int] = []
        self._sorted = np.zeros(0)
        self._of_group: dict[Hashable, list[int]] = {}

    def start_rollout(self) -> None:
        """Forgets which prompts the lengths belong to."""
        self._of_group.clear()
        self._lengths = self._lengths[-MAX_LENGTHS:]
        self._sorted = np.sort(np.asarray(self._lengths, dtype=float))

    def observe(self, length: int, group: Hashable) -> None:
        """A sample has ended."""
        self._lengths.append(length)
        self._sorted = np.insert(self._sorted, np.searchsorted(self._sorted, length), length)
        self._of_group.setdefault(group, []).append(length)

    def survival(self, samples: Sequence[RunningSample], points: np.ndarray) -> np.ndarray:
        """
        Probabilities that samples still run after so many more tokens.

        Args:
            samples (`Sequence[RunningSample]`):
                The samples.
            points (`np.ndarray` of shape (points,)):
                Tokens from now on, the first of them 0.

        Returns:
            `np.ndarray` of shape (samples, points): 1 in the first column.
        """
        tokens = np.array([sample.tokens for sample in samples], dtype=float)
        lengths = tokens[:, None] + points  # shape (samples, points)
        longer = RUN_WEIGHT * (self._count_longer(self._sorted, lengths) + 1.0) / (len(self._sorted) + 1.0)
        for group in {sample.group for sample in samples} & self._of_group.keys():
            rows = [row for row, sample in enumerate(samples) if sample.group == group]
            longer[rows] += self._count_longer(np.sort(np.asarray(self._of_group[group], dtype=float)), lengths[rows])
        at_least = longer / longer[:, :1]
        return np.where((lengths < self.max_tokens) | (points == 0.0), at_least, 0.0)

    @staticmethod
    def _count_longer(in_order: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return np.subtract(len(in_order), np.searchsorted(in_order, lengths, side="right"))


@dataclass(frozen=True, slots=True)
class RankState:
    """
    What a rank tells the others.

    Args:
        running (`np.ndarray` of shape (NUM_POINTS,)):
            Expected number of samples that still run here, guests included, at every point of [`horizons`].
        moving (`np.ndarray` of shape (NUM_POINTS,)):
            Probability that a sample which would be moved still runs; zeros where none can be.
        movable (`int`):
            Samples that can be moved.
        free (`int`):
            Further samples that would run here at once.
        step_time ([`StepTime`], *optional*):
            `None` while nothing has run here.
        move_s (`float`, *optional*, defaults to `0.0`):
            What taking one of its samples in costs another rank.
    """

    running: np.ndarray
    moving: np.ndarray
    movable: int
    free: int
    step_time: StepTime | None
    move_s: float = 0.0

    def row(self) -> np.ndarray:
        """The numbers in one row of a table, of shape (ROW_NUMBERS,)."""
        time = self.step_time or StepTime(0.0, 0.0, 0.0)
        numbers = [self.movable, self.free, self.move_s, time.floor_s, time.knee, time.per_sample_s]
        return np.concatenate([self.running, self.moving, numbers])

    @classmethod
    def idle(cls, free: int, step_time: StepTime | None) -> "RankState":
        """Of a rank on which nothing runs."""
        return cls(np.zeros(NUM_POINTS), np.zeros(NUM_POINTS), 0, free, step_time)


def in_order_of_moving(
    samples: Sequence[RunningSample], survival: LengthSurvival, points: np.ndarray
) -> tuple[list[RunningSample], np.ndarray]:
    """
    Samples that may be moved, the best first: those that are expected to run longest, and of these the ones with the
    shortest context.

    Returns:
        `tuple[list[RunningSample], np.ndarray]`: The samples and their survival at `points`, one row each.
    """
    candidates = [sample for sample in samples if sample.movable]
    if not candidates:
        return [], np.zeros((0, len(points)))
    rows = survival.survival(candidates, points)
    remaining = integral(rows, points)
    order = sorted(
        (row for row in range(len(candidates)) if remaining[row] >= MIN_REMAINING_TOKENS),
        key=lambda row: (-round(float(remaining[row])), candidates[row].context_tokens, candidates[row].key),
    )
    return [candidates[row] for row in order], rows[order]


def describe_rank(
    samples: Sequence[RunningSample],
    survival: LengthSurvival,
    step_time: StepTime | None,
    max_num_seqs: int,
    points: np.ndarray,
    move_s_per_token: float = 0.0,
) -> RankState:
    """The state of a rank on which these samples run."""
    if not samples:
        return RankState.idle(max_num_seqs, step_time)
    movable, rows = in_order_of_moving(samples, survival, points)
    first = rows[: (len(movable) + 1) // 2]  # nobody gives away more than half at once, or would gain by it
    context = float(np.mean([sample.context_tokens for sample in movable])) if movable else 0.0
    return RankState(
        running=survival.survival(samples, points).sum(0),
        moving=first.mean(0) if len(first) else np.zeros(len(points)),
        movable=len(movable),
        free=max(0, max_num_seqs - len(samples)),
        step_time=step_time,
        move_s=move_s_per_token * context,
    )


def integral(values: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Trapezoids over the last axis."""
    return ((values[..., 1:] + values[..., :-1]) * 0.5) @ np.diff(points)


@dataclass(frozen=True, slots=True)
class Move:
    """So many samples go from one rank to another; `gain_s` is what that was predicted to save."""

    donor: int
    receiver: int
    samples: int
    gain_s: float


def plan_moves(table: np.ndarray, points: np.ndarray, min_gain_s: float = 0.0) -> list[Move]:
    """
    Moves that make the rank that would end last end earlier.

    The rank that ends last gives to the one that ends first, until no rank is far above what a perfect split of all
    samples would take. Ranks that are not the last ones keep their samples.

    Args:
        table (`np.ndarray` of shape (ranks, ROW_NUMBERS)):
            [`RankState.row`] of all ranks.
        points (`np.ndarray` of shape (NUM_POINTS,)):
            [`horizons`] of the run.
        min_gain_s (`float`, *optional*, defaults to `0.0`):
            Seconds that a plan must save, besides 2.5 % of what the rank that ends last would take.

    Returns:
        `list[Move]`: In the order in which they were decided; a rank gives or takes and never both.
    """
    return _Planner(table, points).plan(min_gain_s)


class _Planner:
    """One decision: seconds of all ranks, changed as moves are added."""

    def __init__(self, table: np.ndarray, points: np.ndarray):
        self.points = points
        self.running, self.moving = table[:, :NUM_POINTS].copy(), table[:, NUM_POINTS : 2 * NUM_POINTS]
        movable, free, self.move_s, *times = table[:, 2 * NUM_POINTS :].T
        self.movable, self.free = movable.astype(int), free.astype(int)
        self.times = np.stack(times)  # shape (3, ranks)
        known = self.times[0] > 0.0
        # A rank that has run nothing so far is taken to be as fast as the others.
        mean = self.times[:, known].mean(1) if known.any() else np.zeros(3)
        self.times = np.where(known, self.times, mean[:, None])
        self.seconds = integral(StepTime(*self.times[:, :, None]).seconds(self.running), points)
        self.perfect_s = float(integral(StepTime(*mean).seconds(self.running.mean(0)), points))

    def plan(self, min_gain_s: float) -> list[Move]:
        before = self.seconds.copy()
        threshold = max(min_gain_s, MIN_GAIN_SHARE * float(before.max()))
        moves: list[Move] = []
        donors: set[int] = set()
        receivers: set[int] = set()
        while float(self.seconds.max()) - self.perfect_s > threshold and len(moves) < 2 * len(self.seconds):
            donor = int(self.seconds.argmax())
            if donor in receivers or not self.movable[donor]:
                break
            donors.add(donor)
            move = self._best_move(donor, donors)
            if move is None:
                break
            receivers.add(move.receiver)
            moves.append(move)
        # What was left stands for the end of the rollout: whoever would not have been later than that need not move.
        after = float(self.seconds.max())
        return _merged([move for move in moves if before[move.donor] - after > threshold])

    def _best_move(self, donor: int, donors: set[int]) -> Move | None:
        """Adds the next move of a donor; `None` when none makes it end earlier."""
        seconds = np.where(self.free > 0, self.seconds, math.inf)
        seconds[list(donors)] = math.inf
        receiver = int(seconds.argmin())
        most = min(int(self.movable[donor]), int(self.free[receiver]))
        if math.isinf(seconds[receiver]) or most < 1:
            return None
        counts = np.arange(1, most + 1)
        moved = counts[:, None] * self.moving[donor]
        left, taken = np.maximum(self.running[donor] - moved, 0.0), self.running[receiver] + moved
        left_s = integral(StepTime(*self.times[:, donor]).seconds(left), self.points)
        taken_s = integral(StepTime(*self.times[:, receiver]).seconds(taken), self.points)
        # What the receiver has already taken is in its seconds, with the price of taking it.
        paid_s = self.seconds[receiver] - integral(
            StepTime(*self.times[:, receiver]).seconds(self.running[receiver]), self.points
        )
        taken_s += paid_s + counts * self.move_s[donor]
        # No more than the donor needs to give and the receiver can take without ending later than a perfect split;
        # the rest goes to other ranks.
        enough = int(np.searchsorted(-left_s, -self.perfect_s))
        fitting = int(np.searchsorted(taken_s, self.perfect_s, side="right")) - 1
        index = max(0, min(enough, fitting, most - 1))
        gain_s = float(self.seconds[donor]) - max(float(left_s[index]), float(taken_s[index]))
        if gain_s <= 0.0:
            return None
        self.running[donor], self.running[receiver] = left[index], taken[index]
        self.seconds[donor], self.seconds[receiver] = left_s[index], taken_s[index]
        self.movable[donor] -= counts[index]
        self.free[receiver] -= counts[index]
        return Move(donor, receiver, int(counts[index]), gain_s)


def _merged(moves: Sequence[Move]) -> list[Move]:
    """One move for each pair of ranks."""
    of_pair: dict[tuple[int, int], Move] = {}
    for move in moves:
        pair = move.donor, move.receiver
        earlier = of_pair.get(pair, Move(*pair, samples=0, gain_s=0.0))
        of_pair[pair] = Move(*pair, earlier.samples + move.samples, earlier.gain_s + move.gain_s)
    return list(of_pair.values())
