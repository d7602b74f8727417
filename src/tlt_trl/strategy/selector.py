"""What every selector shares: validation, buckets, holding a choice for a few steps, totals, state, summary."""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from math import inf

from .strategy import Strategy, bucket_index, check_edges


class SlidingMedian:
    """
    Lower median of the last `window` values in O(log window) comparisons per append.

    The lower median of two values is the smaller one, so that a first step with seconds of compilation in it is
    forgotten as soon as a second one is seen. Reference twin: `sorted(values[-window:])[(n - 1) // 2]`.
    """

    __slots__ = ("_recent", "_sorted")

    def __init__(self, window: int, values: Sequence[float] = ()) -> None:
        self._recent: deque[float] = deque(values, maxlen=window)
        self._sorted = sorted(self._recent)

    def append(self, value: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(value)
        insort(self._sorted, value)

    def median(self) -> float:
        return self._sorted[(len(self._sorted) - 1) // 2]

    def values(self) -> list[float]:
        """The values held, oldest first."""
        return list(self._recent)

    def __len__(self) -> int:
        return len(self._recent)


class Selector:
    """
    Base class of the selectors. A subclass writes `_choose` and, if it learns, `_observe`, `_state`, `_load_state`.

    Args:
        strategies (`Sequence[Strategy]`):
            The choices ("arms"), in the order of every per-arm array.
        bucket_edges (`Sequence[int]`):
            Upper edges of the batch buckets, strictly increasing. The last one is the largest batch accepted.
        rng (`random.Random`):
            Source of all randomness; its state is part of `state_dict`.
        min_dwell_steps (`int`, *optional*, defaults to `1`):
            Steps for which a choice is held while the batch stays in its bucket. Holding reacts more slowly, but a
            drafter that was off has to catch up less often.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        bucket_edges: Sequence[int],
        rng: random.Random,
        min_dwell_steps: int = 1,
    ) -> None:
        if min_dwell_steps < 1:
            raise ValueError(f"min_dwell_steps={min_dwell_steps} must be at least 1 (1 decides at every step).")
        self.strategies = list(strategies)
        self.bucket_edges = check_edges(bucket_edges)
        self.rng = rng
        self.min_dwell_steps = min_dwell_steps
        self._arm_of = {strategy: arm for arm, strategy in enumerate(self.strategies)}
        # Bucket of each batch size; index 0 is never read.
        self._bucket_of = [0] + [bucket_index(self.bucket_edges, b) for b in range(1, self.bucket_edges[-1] + 1)]
        # [bucket][arm] -> [visits, requests, emitted tokens, seconds]
        self._totals = [[[0, 0, 0, 0.0] for _ in self.strategies] for _ in self.bucket_edges]
        self._held = [-1, 0, 0]  # bucket, arm, steps left

    def select(self, batch_size: int, context_tokens: int = 0) -> Strategy:
        """
        The strategy for the next engine step.

        Args:
            batch_size (`int`):
                Requests that run in the step.
            context_tokens (`int`, *optional*, defaults to `0`):
                Tokens in the key-value cache of these requests, summed.
        """
        bucket = self._bucket(batch_size)
        held_bucket, arm, left = self._held
        if bucket != held_bucket or left == 0:
            arm, left = self._choose(bucket, batch_size, context_tokens), self.min_dwell_steps
        self._held = [bucket, arm, left - 1]
        return self.strategies[arm]

    def update(
        self,
        strategy: Strategy,
        batch_size: int,
        emitted_tokens: int,
        seconds: float,
        context_tokens: int = 0,
        accepted_by_position: Sequence[int] | None = None,
    ) -> None:
        """
        Reports what one engine step did.

        Args:
            strategy (`Strategy`):
                What the step ran with.
            batch_size (`int`):
                Requests that ran in it.
            emitted_tokens (`int`):
                Accepted draft tokens plus one per running request.
            seconds (`float`):
                Duration of the step.
            context_tokens (`int`, *optional*, defaults to `0`):
                Tokens in the key-value cache of these requests, summed.
            accepted_by_position (`Sequence[int]`, *optional*):
                Number of requests whose first, second, ... draft token was accepted, of shape (num_draft_tokens,).
        """
        if strategy not in self._arm_of:
            raise ValueError(f"strategy={strategy} is not among {[str(s) for s in self.strategies]}.")
        arm, bucket, k = self._arm_of[strategy], self._bucket(batch_size), strategy.num_draft_tokens
        if not 0.0 < seconds < inf:  # also refuses NaN
            raise ValueError(f"seconds={seconds!r} must be finite and above 0; measure with time.perf_counter().")
        if not 0 <= emitted_tokens <= batch_size * (k + 1):
            raise ValueError(
                f"emitted_tokens={emitted_tokens} must lie in 0..{batch_size * (k + 1)} for batch_size={batch_size} "
                f"and {strategy}; count accepted draft tokens plus one per running request of this same step."
            )
        if accepted_by_position is not None and len(accepted_by_position) != k:
            raise ValueError(f"accepted_by_position={list(accepted_by_position)} needs {k} entries for {strategy}.")
        total = self._totals[bucket][arm]
        total[0] += 1
        total[1] += batch_size
        total[2] += emitted_tokens
        total[3] += seconds
        self._observe(bucket, arm, batch_size, emitted_tokens, seconds, context_tokens, accepted_by_position)

    def start_rollout(self) -> None:
        """Called once at the beginning of each rollout: policy and drafter have changed since the last one."""
        self._held = [-1, 0, 0]

    def expected_tokens_per_s(self, batch_size: int, context_tokens: float = 0) -> list[float | None]:
        """Expected tokens per second of every strategy at a batch size; `None` where this selector expects nothing."""
        return self._predicted_tokens_per_s(self._bucket(batch_size))

    def summary(self) -> list[dict]:
        """
        One row per bucket and strategy. `tokens_per_s` is measured over all visits, first uses included;
        `predicted_tokens_per_s` is what the selector expects now at the bucket's upper edge, `None` where it expects
        nothing.
        """
        rows, low = [], 1
        for bucket, high in enumerate(self.bucket_edges):
            predicted = self._predicted_tokens_per_s(bucket)
            for arm, strategy in enumerate(self.strategies):
                visits, requests, tokens, seconds = self._totals[bucket][arm]
                rows.append(
                    {
                        "bucket_low": low,
                        "bucket_high": high,
                        "strategy": str(strategy),
                        "visits": visits,
                        "emitted_tokens": tokens,
                        "seconds": seconds,
                        "tokens_per_s": tokens / seconds if visits else None,
                        "tokens_per_request": tokens / requests if visits else None,
                        "predicted_tokens_per_s": predicted[arm],
                    }
                )
            low = high + 1
        return rows

    def state_dict(self) -> dict:
        """Everything that a resumed run needs to make the same choices, as JSON values."""
        version, internal, gauss = self.rng.getstate()
        return {
            "kind": type(self).__name__,
            "strategies": [str(s) for s in self.strategies],
            "bucket_edges": self.bucket_edges,
            "rng": [version, list(internal), gauss],
            "held": list(self._held),
            "totals": [[list(total) for total in arms] for arms in self._totals],
            **self._state(),
        }

    def load_state_dict(self, state: dict) -> None:
        """
        Restores what `state_dict` returned.

        Raises:
            `ValueError`: If the state is that of another kind of selector, or of other strategies or buckets. Nothing
            is changed then.
        """
        mine = {
            "kind": type(self).__name__,
            "strategies": [str(s) for s in self.strategies],
            "bucket_edges": self.bucket_edges,
        }
        for name, value in mine.items():
            if state[name] != value:
                raise ValueError(
                    f"{name}={state[name]} of the saved state differs from {value}; start a new selector."
                )
        version, internal, gauss = state["rng"]
        self.rng.setstate((version, tuple(internal), gauss))
        self._held = list(state["held"])
        self._totals = [[list(total) for total in arms] for arms in state["totals"]]
        self._load_state(state)

    def _bucket(self, batch_size: int) -> int:
        if not 1 <= batch_size <= self.bucket_edges[-1]:
            bucket_index(self.bucket_edges, batch_size)  # raises with the full message
        return self._bucket_of[batch_size]

    def _choose(self, bucket: int, batch_size: int, context_tokens: int) -> int:
        raise NotImplementedError

    def _observe(
        self,
        bucket: int,
        arm: int,
        batch_size: int,
        emitted_tokens: int,
        seconds: float,
        context_tokens: int,
        accepted_by_position: Sequence[int] | None,
    ) -> None:
        """Learns from one step."""

    def _predicted_tokens_per_s(self, bucket: int) -> list[float | None]:
        return [None] * len(self.strategies)

    def _state(self) -> dict:
        return {}

    def _load_state(self, state: dict) -> None:
        """Restores what `_state` returned."""
