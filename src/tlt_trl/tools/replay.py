"""
Replays a recorded run: a JSONL with one engine step per line,

    {"strategy": "eagle3 x3", "batch_size": 4, "emitted_tokens": 13, "seconds": 0.021}

The batch sizes come in the order recorded, each for the tokens it emitted then. What a strategy does at a batch size
is drawn, with a fixed seed, from the steps recorded for it at that size, or else in its bucket. Every strategy must
have been recorded in every bucket: let them alternate while recording.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..strategy import make_selector
from ..strategy.selector import Selector
from ..strategy.strategy import Strategy, bucket_edges, bucket_index, with_off


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded engine step."""

    strategy: Strategy
    batch_size: int
    emitted_tokens: int
    seconds: float


def read_steps(path: str) -> list[Step]:
    """Reads the JSONL at `path`."""
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    if not rows:
        raise ValueError(f"{path} has no steps; write one JSON object per engine step.")
    return [Step(Strategy.parse(r["strategy"]), r["batch_size"], r["emitted_tokens"], r["seconds"]) for r in rows]


class Recording:
    """Steps grouped by bucket and strategy."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = list(steps)
        self.edges = bucket_edges(max(step.batch_size for step in steps))
        self.strategies = with_off(list(dict.fromkeys(step.strategy for step in steps)))
        self.pools: dict[tuple[int, Strategy], list[Step]] = defaultdict(list)
        for step in steps:
            self.pools[bucket_index(self.edges, step.batch_size), step.strategy].append(step)

    def rate(self, bucket: int, strategy: Strategy) -> float:
        """Recorded tokens/s; 0.0 where nothing was recorded."""
        pool = self.pools.get((bucket, strategy), [])
        return sum(step.emitted_tokens for step in pool) / sum(step.seconds for step in pool) if pool else 0.0

    def best(self, bucket: int) -> Strategy:
        """The strategy with most recorded tokens/s in the bucket: what the oracle plays."""
        return max(self.strategies, key=lambda strategy: self.rate(bucket, strategy))


def play_recording(recording: Recording, selector: Selector | None, seed: int) -> float:
    """Seconds that `selector`, or the oracle when it is `None`, needs for the recorded tokens."""
    rng, total_s, owed_tokens = random.Random(seed), 0.0, 0
    for recorded in recording.steps:
        bucket = bucket_index(recording.edges, recorded.batch_size)
        owed_tokens += recorded.emitted_tokens
        while owed_tokens > 0:
            strategy = recording.best(bucket) if selector is None else selector.select(recorded.batch_size)
            pool = recording.pools.get((bucket, strategy))
            if pool is None:
                raise ValueError(f"no step of {strategy} was recorded at batch {recorded.batch_size}; record it too.")
            same_batch = [step for step in pool if step.batch_size == recorded.batch_size]
            step = rng.choice(same_batch or pool)
            if selector is not None:
                selector.update(strategy, step.batch_size, step.emitted_tokens, step.seconds)
            total_s += step.seconds
            owed_tokens -= step.emitted_tokens
    return total_s


def replay_table(path: str, seeds: Sequence[int]) -> dict[str, dict[str, float]]:
    """Share of the oracle's tokens/s by selector, as the simulator's table has it."""
    recording = Recording(read_steps(path))
    names = ("beg_mab", "cost_model", "auto")
    row = dict.fromkeys(names, 0.0)
    for seed in seeds:
        oracle_s = play_recording(recording, None, seed)
        for name in names:
            selector = make_selector(name, recording.strategies, recording.edges[-1], seed)
            row[name] += oracle_s / play_recording(recording, selector, seed) / len(seeds)
    return {"replay": row}
