"""
BEG-MAB, the bucketed epsilon-greedy bandit of TLT (arXiv 2511.16665), without the faults of its public code.

The paper keeps, per strategy, the rewards `tokens / seconds` of the last steps and plays the best median. Here
* every bucket holds every strategy, and unseen ones are tried first;
* the value of an arm is `mean(tokens per request) * median(requests per second)`. The median of the quotient is biased
  when few requests run: with one request, 3 draft tokens and 0.87 acceptance, most steps emit 4 tokens while the mean
  is 3.3. Token counts are bounded, so a mean is safe; times have spikes, so they keep the median;
* the first visits of an arm in a bucket, which may compile, are not learned from;
* exploration decays per arm and bucket, is rarer for arms that are known to be bad, and re-opens on drift;
* for arms that a bucket has not seen, it goes by its nearest neighbour, and does not try hopeless arms at once.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from .selector import Selector, SlidingMedian
from .strategy import Strategy, with_off


class Cell:
    """What one arm did in one bucket: the last `window` learned steps."""

    __slots__ = ("requests_per_s", "tokens_per_request", "token_sum", "visits", "trials", "shift")

    def __init__(self, window: int) -> None:
        self.requests_per_s = SlidingMedian(window)
        self.tokens_per_request: deque[float] = deque(maxlen=window)
        self.token_sum = 0.0
        self.visits = 0  # all steps, warm-up included
        self.trials = 0.0  # explorations since exploration last re-opened
        self.shift = 0.0  # running mean of (value of a step / value of the window) - 1

    def append(self, requests_per_s: float, tokens_per_request: float) -> None:
        if len(self.tokens_per_request) == self.tokens_per_request.maxlen:
            self.token_sum -= self.tokens_per_request[0]
        self.tokens_per_request.append(tokens_per_request)
        self.token_sum += tokens_per_request
        self.requests_per_s.append(requests_per_s)

    def value(self) -> float:
        """Tokens per second; only for a cell that has learned from a step."""
        return self.token_sum / len(self.tokens_per_request) * self.requests_per_s.median()

    def clear(self, window: int) -> None:
        """Starts an empty window after a drift, keeping the count of visits: nothing compiles again."""
        self.requests_per_s, self.token_sum, self.shift = SlidingMedian(window), 0.0, 0.0
        self.tokens_per_request.clear()

    def __len__(self) -> int:
        return len(self.tokens_per_request)


class BEGMAB(Selector):
    """
    Args:
        strategies (`Sequence[Strategy]`):
            The arms. "Off" is added when missing.
        bucket_edges (`Sequence[int]`):
            Upper edges of the batch buckets.
        epsilon (`float`, *optional*, defaults to `0.1`):
            Probability that a fresh bucket explores at a decision. An arm explored `n` times whose value is `v` of the
            best one's is explored with probability `epsilon / arms * v**4 / (1 + n)`.
        window (`int`, *optional*, defaults to `64`):
            Number of recent steps that determine an arm's value.
        rng (`random.Random`, *optional*, defaults to `random.Random(0)`):
            Source of the exploration.
        min_dwell_steps (`int`, *optional*, defaults to `4`):
            Steps for which a choice is held within a bucket.
        warmup_steps (`int`, *optional*, defaults to `1`):
            First visits of an arm in a bucket that are not learned from.
        min_samples (`int`, *optional*, defaults to `3`):
            An arm with fewer learned steps counts as unseen.
        hopeless (`float`, *optional*, defaults to `0.7`):
            An unseen arm that is worth less than this share of the best one in the neighbour bucket is left to
            exploration instead of being tried at once.
        drift (`float`, *optional*, defaults to `0.3`):
            Running mean of the relative change of the value that counts as drift.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        bucket_edges: Sequence[int],
        epsilon: float = 0.1,
        window: int = 64,
        rng: random.Random | None = None,
        min_dwell_steps: int = 4,
        warmup_steps: int = 1,
        min_samples: int = 3,
        hopeless: float = 0.7,
        drift: float = 0.3,
    ) -> None:
        if not 0.0 <= epsilon <= 1.0:
            raise ValueError(f"epsilon={epsilon} must lie in 0..1; 0.1 is the default.")
        if not 1 <= min_samples <= window:
            raise ValueError(f"min_samples={min_samples} must lie in 1..window={window}.")
        super().__init__(with_off(strategies), bucket_edges, rng or random.Random(0), min_dwell_steps)
        self.epsilon = epsilon
        self.window = window
        self.warmup_steps = warmup_steps
        self.min_samples = min_samples
        self.hopeless = hopeless
        self.drift = drift
        self._cells = [[Cell(window) for _ in self.strategies] for _ in self.bucket_edges]
        self._values = [[0.0] * len(self.strategies) for _ in self.bucket_edges]  # 0.0 while unseen
        buckets = range(len(self.bucket_edges))  # all other buckets, nearest first
        self._neighbours = [sorted((b for b in buckets if b != m), key=lambda b: abs(b - m)) for m in buckets]

    def _choose(self, bucket: int, batch_size: int, context_tokens: int) -> int:
        values, cells = self._values[bucket], self._cells[bucket]
        prior = self._neighbour_values(bucket) if 0.0 in values else values
        unseen = [arm for arm, value in enumerate(values) if value == 0.0 and prior[arm] >= self.hopeless]
        if unseen:
            return max(unseen, key=prior.__getitem__)
        best_value = max(values)
        best = values.index(best_value)
        draw = self.rng.random() * len(cells) / self.epsilon if self.epsilon else float("inf")
        if draw >= len(cells):  # no arm has a probability above epsilon / arms
            return best
        for arm, cell in enumerate(cells):
            share = values[arm] / best_value if values[arm] else prior[arm]
            draw -= share**4 / (1.0 + cell.trials) if arm != best else 0.0
            if draw < 0.0:
                cell.trials += 1.0
                return arm
        return best

    def _neighbour_values(self, bucket: int) -> list[float]:
        """
        For the arms unseen here: value relative to the best one in the nearest bucket that has seen the arm, 1.0 where
        none has.
        """
        prior = [1.0] * len(self.strategies)
        missing = [arm for arm, value in enumerate(self._values[bucket]) if not value]
        for neighbour in self._neighbours[bucket]:
            values = self._values[neighbour]
            best = max(values)
            for arm in missing:
                if values[arm]:
                    prior[arm] = values[arm] / best
            missing = [arm for arm in missing if not values[arm]]
        return prior

    def _observe(self, bucket, arm, batch_size, emitted_tokens, seconds, context_tokens, accepted_by_position) -> None:
        cell = self._cells[bucket][arm]
        cell.visits += 1
        if cell.visits <= self.warmup_steps:
            return
        requests_per_s, tokens_per_request = batch_size / seconds, emitted_tokens / batch_size
        value = self._values[bucket][arm]
        if value:
            # Clipped so that no single step is a drift. 1/16: about 16 steps must agree.
            change = requests_per_s * tokens_per_request / value - 1.0
            cell.shift += (min(change, 1.0) - cell.shift) / 16.0
            if abs(cell.shift) > self.drift:
                cell.clear(self.window)
                self._reopen(0.0)
        cell.append(requests_per_s, tokens_per_request)
        if len(cell) >= self.min_samples:
            self._values[bucket][arm] = cell.value()

    def _reopen(self, keep: float) -> None:
        """Scales the number of explorations in all cells; 0.0 makes exploration start over."""
        for cells in self._cells:
            for cell in cells:
                cell.trials *= keep

    def start_rollout(self) -> None:
        super().start_rollout()
        self._reopen(0.5)

    def _predicted_tokens_per_s(self, bucket: int) -> list[float | None]:
        return [value or None for value in self._values[bucket]]

    def _state(self) -> dict:
        cells = [
            [
                {
                    "requests_per_s": cell.requests_per_s.values(),
                    "tokens_per_request": list(cell.tokens_per_request),
                    "token_sum": cell.token_sum,
                    "visits": cell.visits,
                    "trials": cell.trials,
                    "shift": cell.shift,
                }
                for cell in row
            ]
            for row in self._cells
        ]
        return {"cells": cells, "values": [list(values) for values in self._values]}

    def _load_state(self, state: dict) -> None:
        self._values = [list(values) for values in state["values"]]
        for row, saved_row in zip(self._cells, state["cells"], strict=True):
            for cell, saved in zip(row, saved_row, strict=True):
                cell.requests_per_s = SlidingMedian(self.window, saved["requests_per_s"])
                cell.tokens_per_request = deque(saved["tokens_per_request"], maxlen=self.window)
                cell.token_sum, cell.visits = saved["token_sum"], saved["visits"]
                cell.trials, cell.shift = saved["trials"], saved["shift"]
