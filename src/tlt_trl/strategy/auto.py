"""
The default selector: the cost model (RLHFSpec, arXiv 2512.04752) as prior and pruner, a bandit (TLT, arXiv 2511.16665)
as corrector, and a budget that bounds what exploration may cost.

    value(arm) = tokens / seconds predicted by the cost model * correction(bucket, arm)

The correction is what the linear step-time model gets wrong about that arm in that bucket, shrunk towards what it gets
wrong in the neighbour buckets. An arm is explored only if it could be the best (its value times 1 + uncertainty beats
the best value) and while the time lost to exploration stays below a share of the time spent. That loss is measured,
compilation included, so what exploration costs is bounded by construction.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from .cost_model import CostModel
from .selector import Selector, SlidingMedian
from .strategy import Strategy, with_off


class FirstUsePrice:
    """
    What the first use of an arm in a bucket costs beyond a step, such as compilation, and when it is worth paying.

    The price is the median over cells of `seconds of the first step - seconds of the second`. A bucket pays it like a
    skier who rents before buying: an arm never used there is discounted by `price / (price + seconds spent in the
    bucket)`, so a bucket that is seldom visited does not pay for arms it would hardly use.
    """

    def __init__(self, num_buckets: int, num_arms: int) -> None:
        self.used: np.ndarray = np.zeros((num_buckets, num_arms), dtype=bool)
        self.first_s = np.zeros((num_buckets, num_arms))  # 0.0 unless the cell's second step is awaited
        self.spent_s = [0.0] * num_buckets
        self.prices_s = SlidingMedian(15)

    def update(self, bucket: int, arm: int, seconds: float) -> None:
        if not self.used[bucket, arm]:
            self.used[bucket, arm] = True
            self.first_s[bucket, arm] = seconds
            return
        self.spent_s[bucket] += seconds
        first_s = float(self.first_s[bucket, arm])
        if first_s:
            self.prices_s.append(max(0.0, first_s - seconds))
            self.first_s[bucket, arm] = 0.0

    def price_s(self) -> float:
        return self.prices_s.median() if len(self.prices_s) else 0.0

    def discount(self, bucket: int, values: np.ndarray) -> None:
        """Scales, in place, the values of arms not yet used in a bucket that has used some."""
        used, price_s = self.used[bucket], self.price_s()
        if price_s and used.any():
            values[~used] *= self.spent_s[bucket] / (price_s + self.spent_s[bucket])

    def state_dict(self) -> dict:
        return {
            "used": self.used.tolist(),
            "first_s": self.first_s.tolist(),
            "spent_s": list(self.spent_s),
            "prices_s": self.prices_s.values(),
        }

    def load_state_dict(self, state: dict) -> None:
        self.used, self.first_s = np.array(state["used"], dtype=bool), np.array(state["first_s"])
        self.spent_s, self.prices_s = list(state["spent_s"]), SlidingMedian(15, state["prices_s"])


class AutoSelector(Selector):
    """
    Args:
        strategies (`Sequence[Strategy]`):
            The arms. "Off" is added when missing.
        bucket_edges (`Sequence[int]`):
            Upper edges of the batch buckets.
        rng (`random.Random`, *optional*, defaults to `random.Random(0)`):
            Not drawn from; part of the common interface.
        min_dwell_steps (`int`, *optional*, defaults to `4`):
            Steps for which a choice is held within a bucket.
        exploration_budget (`float`, *optional*, defaults to `0.005`):
            Share of the time that exploration may lose. 0.0 plays the best value known, apart from one try of "off".
        grace_steps (`int`, *optional*, defaults to `1000`):
            Steps whose share of the budget is available from the start.
        uncertainty (`float`, *optional*, defaults to `0.3`):
            Relative uncertainty of an arm never seen in its bucket; it falls with the square root of the steps seen.
        shrink_steps (`float`, *optional*, defaults to `2.0`):
            Steps at which a bucket's own correction is trusted half.
        rollout_memory (`float`, *optional*, defaults to `0.8`):
            Factor on the steps seen at the start of a rollout: exploration re-opens as the policy moves.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        bucket_edges: Sequence[int],
        rng: random.Random | None = None,
        min_dwell_steps: int = 4,
        exploration_budget: float = 0.005,
        grace_steps: int = 1000,
        uncertainty: float = 0.3,
        shrink_steps: float = 2.0,
        rollout_memory: float = 0.8,
    ) -> None:
        if not 0.0 <= exploration_budget <= 1.0:
            raise ValueError(f"exploration_budget={exploration_budget} must lie in 0..1; 0.005 is the default.")
        if not 0.0 <= rollout_memory <= 1.0:
            raise ValueError(f"rollout_memory={rollout_memory} must lie in 0..1; 0.8 is the default.")
        super().__init__(with_off(strategies), bucket_edges, rng or random.Random(0), min_dwell_steps)
        self.exploration_budget = exploration_budget
        self.grace_steps = grace_steps
        self.uncertainty = uncertainty
        self.shrink_steps = shrink_steps
        self.rollout_memory = rollout_memory
        self.model = CostModel(self.strategies, self.bucket_edges[-1])
        self.first_use = FirstUsePrice(len(self.bucket_edges), len(self.strategies))
        self._off_arm = self.strategies.index(Strategy.off())
        shape = (len(self.bucket_edges), len(self.strategies))
        self._correction = np.ones(shape)
        self._seen = np.zeros(shape)
        # Weight of every other bucket as a neighbour: halved per bucket of distance, 0 for itself.
        distance = np.abs(np.subtract.outer(np.arange(shape[0]), np.arange(shape[0])))
        self._kernel = np.where(distance, 0.5**distance, 0.0)
        self._steps = 0
        self._elapsed_s = 0.0
        self._lost_s = 0.0
        self._exploring = [-1, -1, 0.0]  # bucket, arm, tokens/s given up

    def start_rollout(self) -> None:
        super().start_rollout()
        self._seen *= self.rollout_memory
        self.model.forget_acceptance(0.5)

    def explain(self, batch_size: int, context_tokens: int = 0) -> list[dict]:
        """The numbers behind the choice, one row per arm, best first; values include the first-use discount."""
        bucket = self._bucket(batch_size)
        values = self._values(bucket, batch_size, context_tokens)
        rows = self.model.explain(batch_size, context_tokens)
        for arm, row in enumerate(rows):
            row["correction"] = float(self._correction[bucket, arm])
            row["value_tokens_per_s"] = float(values[arm])
        return sorted(rows, key=lambda row: -row["value_tokens_per_s"])

    def expected_tokens_per_s(self, batch_size: int, context_tokens: float = 0) -> list[float | None]:
        rates = self.model.tokens_per_s(batch_size, context_tokens)
        return (rates * self._correction[self._bucket(batch_size)]).tolist()

    def exploration(self) -> dict[str, float]:
        """What exploration has cost so far: `lost_s`, of `elapsed_s`, and the price of a first use."""
        return {"lost_s": self._lost_s, "elapsed_s": self._elapsed_s, "first_use_s": self.first_use.price_s()}

    def _values(self, bucket: int, batch_size: int, context_tokens: float) -> np.ndarray:
        """Expected tokens per second, of shape (arms,)."""
        values = self.model.tokens_per_s(batch_size, context_tokens) * self._correction[bucket]
        self.first_use.discount(bucket, values)
        return values

    def _choose(self, bucket: int, batch_size: int, context_tokens: int) -> int:
        self._exploring = [-1, -1, 0.0]
        if self._steps == 0:
            return self._off_arm  # the baseline that everything is compared with
        values = self._values(bucket, batch_size, context_tokens)
        best = int(values.argmax())
        optimistic = values * (1.0 + self.uncertainty / np.sqrt(1.0 + self._seen[bucket]))
        optimistic[best] = values[best]
        arm, off = int(optimistic.argmax()), self._off_arm
        if not self.first_use.used[bucket, off] and optimistic[off] > values[best]:
            arm = off  # "never slower" needs to know off: its first try in a bucket does not wait for the budget
        elif arm == best or not self._affordable():
            return best
        self._exploring = [bucket, arm, float(values[best])]
        return arm

    def _affordable(self) -> bool:
        grace_s = self.grace_steps * self._elapsed_s / self._steps
        return self._lost_s < self.exploration_budget * (self._elapsed_s + grace_s)

    def _observe(self, bucket, arm, batch_size, emitted_tokens, seconds, context_tokens, accepted_by_position) -> None:
        self._steps += 1
        self._elapsed_s += seconds
        if self._exploring[0] == bucket and self._exploring[1] == arm:
            # Signed, because the tokens of one step are luck; an exploration that pays gives time back.
            self._lost_s = max(0.0, self._lost_s + seconds - emitted_tokens / self._exploring[2])
        self.first_use.update(bucket, arm, seconds)
        self._seen[bucket, arm] += 1.0
        if self.model.update(arm, batch_size, emitted_tokens, seconds, context_tokens, accepted_by_position):
            self._correct()

    def _correct(self) -> None:
        """Correction of each bucket and arm from the residuals of the step-time fit, of shape (buckets, arms)."""
        batches, arms, steps, residuals = self.model.step_time.log_residuals()
        shape = self._seen.shape
        cells: np.ndarray = np.take(self._bucket_of, batches) * shape[1] + arms
        weight = np.bincount(cells, steps, shape[0] * shape[1]).reshape(shape)
        total = np.bincount(cells, steps * np.clip(residuals, -1.0, 1.0), shape[0] * shape[1]).reshape(shape)
        prior = self._kernel @ total / (self._kernel @ weight + self.shrink_steps)
        self._correction = np.exp(-(total + self.shrink_steps * prior) / (weight + self.shrink_steps))

    def _predicted_tokens_per_s(self, bucket: int) -> list[float | None]:
        values = self.model.tokens_per_s(self.bucket_edges[bucket], 0) * self._correction[bucket]
        return values.tolist()

    def _state(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "first_use": self.first_use.state_dict(),
            "correction": self._correction.tolist(),
            "seen": self._seen.tolist(),
            "steps": self._steps,
            "elapsed_s": self._elapsed_s,
            "lost_s": self._lost_s,
            "exploring": list(self._exploring),
        }

    def _load_state(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.first_use.load_state_dict(state["first_use"])
        self._correction, self._seen = np.array(state["correction"]), np.array(state["seen"])
        self._steps, self._elapsed_s, self._lost_s = state["steps"], state["elapsed_s"], state["lost_s"]
        self._exploring = list(state["exploring"])
