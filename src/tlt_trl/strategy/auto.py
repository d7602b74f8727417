"""
The default selector: the cost model (RLHFSpec, arXiv 2512.04752) as prior and pruner, a bandit (TLT, arXiv 2511.16665)
as corrector, and a budget that bounds what exploration may cost.

    value(arm) = tokens / seconds predicted by the cost model * correction(bucket, arm)

The correction is the measured over the predicted rate of that arm in that bucket, shrunk to 1 while few steps were seen.
An arm is explored only if it could be the best one (its value times 1 + uncertainty beats the best value) and if the
time lost to exploration so far stays below a share of the time spent. That loss is measured, compilation included, so
"never slower" holds by construction up to that share.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from .cost_model import CostModel
from .selector import Selector, SlidingMedian
from .strategy import Strategy, with_off


class AutoSelector(Selector):
    """
    Args:
        strategies (`Sequence[Strategy]`):
            The arms. "Off" is added when missing.
        bucket_edges (`Sequence[int]`):
            Upper edges of the batch buckets.
        rng (`random.Random`, *optional*, defaults to `random.Random(0)`):
            Breaks ties between arms that are worth exploring.
        min_dwell_steps (`int`, *optional*, defaults to `4`):
            Steps for which a choice is held within a bucket.
        exploration_budget (`float`, *optional*, defaults to `0.01`):
            Share of the time that exploration may lose.
        grace_steps (`int`, *optional*, defaults to `1000`):
            Steps of which the budget is available from the start.
        uncertainty (`float`, *optional*, defaults to `0.5`):
            Relative uncertainty of an arm never seen in its bucket; it falls with the square root of the steps seen.
        shrink_steps (`float`, *optional*, defaults to `8.0`):
            Steps at which the correction is trusted half.
        memory_steps (`float`, *optional*, defaults to `64.0`):
            Steps after which an observation has lost most of its weight in the correction.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        bucket_edges: Sequence[int],
        rng: random.Random | None = None,
        min_dwell_steps: int = 4,
        exploration_budget: float = 0.005,
        grace_steps: int = 1000,
        uncertainty: float = 0.25,
        shrink_steps: float = 2.0,
        memory_steps: float = 64.0,
        price_factor: float = 1.0,
        keep: float = 0.8,
    ) -> None:
        super().__init__(with_off(strategies), bucket_edges, rng or random.Random(0), min_dwell_steps)
        self.exploration_budget = exploration_budget
        self.grace_steps = grace_steps
        self.uncertainty = uncertainty
        self.shrink_steps = shrink_steps
        self.memory_steps = memory_steps
        self.keep = keep
        self.price_factor = price_factor
        self.model = CostModel(self.strategies, self.bucket_edges[-1])
        self._off_arm = self.strategies.index(Strategy.off())
        shape = (len(self.bucket_edges), len(self.strategies))
        self._seen = np.zeros(shape)  # steps, halved at every rollout
        self._correction = np.ones(shape)
        distance = np.abs(np.subtract.outer(np.arange(shape[0]), np.arange(shape[0])))
        self._kernel = np.where(distance, 0.5**distance, 0.0)
        self._used = np.zeros(shape, dtype=bool)
        self._bucket_s = np.zeros(shape[0])
        self._first_s = np.zeros(shape)
        self._prices = SlidingMedian(15)
        self._steps = 0
        self._elapsed_s = 0.0
        self._lost_s = 0.0
        self._exploring = [-1, -1, 0.0]  # bucket, arm, tokens/s given up

    def _values(self, bucket: int, batch_size: int, context_tokens: float) -> np.ndarray:
        """Expected tokens per second, of shape (arms,)."""
        values = self.model.tokens_per_s(batch_size, context_tokens) * self._correction[bucket]
        if len(self._prices) and self._used[bucket].any():
            price = self.price_factor * self._prices.median() + 1e-9
            values[~self._used[bucket]] *= 1.0 - price / (price + self._bucket_s[bucket])
        return values

    def _choose(self, bucket: int, batch_size: int, context_tokens: int) -> int:
        self._exploring = [-1, -1, 0.0]
        values = self._values(bucket, batch_size, context_tokens)
        best = int(values.argmax())
        if self._steps == 0:
            return self._off_arm
        optimistic = values * (1.0 + self.uncertainty / np.sqrt(1.0 + self._seen[bucket]))
        optimistic[best] = values[best]
        arm = int(optimistic.argmax())
        if not self._used[bucket, self._off_arm] and optimistic[self._off_arm] > values[best]:
            arm = self._off_arm
        elif arm == best or not self._affordable():
            return best
        self._exploring = [bucket, arm, float(values[best])]
        return arm

    def _affordable(self) -> bool:
        grace_s = self._elapsed_s / max(self._steps, 1) * self.grace_steps
        return self._lost_s <= self.exploration_budget * (self._elapsed_s + grace_s)

    def _observe(self, bucket, arm, batch_size, emitted_tokens, seconds, context_tokens, accepted_by_position) -> None:
        self._steps += 1
        self._elapsed_s += seconds
        if self._exploring[:2] == [bucket, arm]:
            self._lost_s = max(0.0, self._lost_s + seconds - emitted_tokens / self._exploring[2])
        if not self._used[bucket, arm]:
            self._used[bucket, arm] = True
            self._first_s[bucket, arm] = seconds
        else:
            self._bucket_s[bucket] += seconds
            if self._first_s[bucket, arm]:
                self._prices.append(max(0.0, float(self._first_s[bucket, arm]) - seconds))
                self._first_s[bucket, arm] = 0.0
        self._seen[bucket, arm] += 1.0
        if self.model.update(arm, batch_size, emitted_tokens, seconds, context_tokens, accepted_by_position):
            self._correct()

    def _correct(self):
        batches, arms, count, errors = self.model.step_time.log_errors
        cells = (np.array(self._bucket_of)[batches], arms)
        weight, total = np.zeros_like(self._seen), np.zeros_like(self._seen)
        np.add.at(weight, cells, count)
        np.add.at(total, cells, count * np.clip(errors, -1.0, 1.0))
        prior = self._kernel @ total / (self._kernel @ weight + self.shrink_steps)
        self._correction = np.exp(-(total + self.shrink_steps * prior) / (weight + self.shrink_steps))

    def start_rollout(self) -> None:
        super().start_rollout()
        self._seen *= self.keep
        self.model.forget_acceptance(0.5)

    def _predicted_tokens_per_s(self, bucket: int) -> list[float | None]:
        return self._values(bucket, self.bucket_edges[bucket], 0).tolist()
