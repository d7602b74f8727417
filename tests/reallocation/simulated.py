"""
Rollouts of many ranks whose samples are moved by the planner, on a clock of their own.

Every rank steps all its samples at the speed of a two-piece step time; at fixed intervals all ranks describe
themselves as in a run, the plan is made from that, and moved samples cost the receiver a prefill.
"""

from dataclasses import dataclass

import numpy as np

from tlt_trl.idle.reallocation import (
    LengthSurvival,
    RunningSample,
    StepTime,
    describe_rank,
    horizons,
    in_order_of_moving,
    plan_moves,
)


@dataclass
class Rollout:
    """`owner` and `length` of every sample; samples with equal `group` share a prompt."""

    owner: np.ndarray
    length: np.ndarray
    group: np.ndarray
    num_ranks: int
    max_tokens: int
    step_time: StepTime
    earlier_lengths: np.ndarray  # of a rollout before this one
    interval_s: float = 1.0
    prefill_s: float = 0.05
    moves: int = 0
    plans: int = 0


def perfect_split_s(rollout: Rollout) -> float:
    """Every sample at every moment on the rank with the fewest: a bound for whoever knows all lengths."""
    lengths = np.sort(rollout.length)
    running = len(lengths) - np.arange(len(lengths))
    per_rank = np.maximum(np.ceil(running / rollout.num_ranks), 1.0)
    return float((np.diff(lengths, prepend=0) * rollout.step_time.seconds(per_rank)).sum())


def makespan_s(rollout: Rollout, reallocates: bool, tick_s: float = 0.05) -> float:
    """Seconds until the last sample has ended."""
    rank = rollout.owner.copy()
    done = np.zeros(len(rank))
    points = horizons(rollout.max_tokens)
    survivals = [LengthSurvival(rollout.max_tokens) for _ in range(rollout.num_ranks)]
    for survival in survivals:
        for length in rollout.earlier_lengths:
            survival.observe(int(length), None)
        survival.start_rollout()
    busy_until = np.zeros(rollout.num_ranks)
    running = np.ones(len(rank), dtype=bool)
    now, next_plan = 0.0, rollout.interval_s
    while running.any():
        counts = np.bincount(rank[running], minlength=rollout.num_ranks).astype(float)
        speed = np.divide(1.0, rollout.step_time.seconds(counts), out=np.zeros_like(counts), where=counts > 0)
        usable = np.clip(now + tick_s - np.maximum(busy_until, now), 0.0, tick_s)
        done[running] += (usable * speed)[rank[running]]
        now += tick_s
        ended = running & (done >= rollout.length)
        for index in np.flatnonzero(ended):
            survivals[rollout.owner[index]].observe(int(rollout.length[index]), int(rollout.group[index]))
        running &= ~ended
        if reallocates and now >= next_plan:
            next_plan += rollout.interval_s
            _reallocate(rollout, rank, done, running, survivals, points, busy_until, now)
    return now


def _reallocate(rollout, rank, done, running, survivals, points, busy_until, now) -> None:
    by_rank = [[] for _ in range(rollout.num_ranks)]
    for index in np.flatnonzero(running):
        by_rank[rank[index]].append(index)
    samples = [
        [
            RunningSample(
                str(i), int(rollout.group[i]), int(done[i]), int(done[i]) + 100, movable=rank[i] == rollout.owner[i]
            )
            for i in mine
        ]
        for mine in by_rank
    ]
    table = np.stack(
        [
            describe_rank(mine, survivals[r], rollout.step_time, 10_000, points, rollout.prefill_s / 1000).row()
            for r, mine in enumerate(samples)
        ]
    )
    moves = plan_moves(table, points)
    rollout.plans += bool(moves)
    for donor in {move.donor for move in moves}:
        order, _ = in_order_of_moving(samples[donor], survivals[donor], points)
        for move in moves:
            if move.donor == donor:
                for sample in order[: move.samples]:
                    rank[int(sample.key)] = move.receiver
                order = order[move.samples :]
                rollout.moves += move.samples
                busy_until[move.receiver] = max(busy_until[move.receiver], now) + move.samples * rollout.prefill_s
