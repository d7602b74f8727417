"""
Step-time model and acceptance model, and the strategy with the best predicted tokens per second: the rule of RLHFSpec
(arXiv 2512.04752), which publishes the idea but no formulas; the formulas here are our own.

    seconds  = c0 + c1 * batch + c2 * verified tokens + c3 * context tokens
               + (c4 + c_drafter * draft tokens if speculating)
    tokens   = batch * (1 + p1 + p1 p2 + ...)          p_i: acceptance of draft token i given that i - 1 was accepted
    choice   = argmax tokens / seconds

Seconds are fitted in step_time.py, acceptance is counted in acceptance.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from .acceptance import AcceptanceModel, spread_accepted
from .selector import Selector
from .step_time import StepTimeModel
from .strategy import Strategy, with_off


class CostModel:
    """
    Predicts tokens and seconds of a step for every arm.

    Args:
        strategies (`Sequence[Strategy]`):
            The arms.
        max_batch_size (`int`):
            Largest batch.
    """

    def __init__(self, strategies: Sequence[Strategy], max_batch_size: int) -> None:
        self.strategies = list(strategies)
        self.step_time = StepTimeModel(strategies, max_batch_size)
        longest = max(s.num_draft_tokens for s in strategies)
        self.acceptance = [AcceptanceModel(longest) for _ in self.step_time.methods]
        methods = self.step_time.methods
        # Acceptance model of each arm; off has none.
        self.drafter_of = [None if s.is_off else methods.index((s.method, s.draft_sampling)) for s in strategies]
        self.draft_tokens = [s.num_draft_tokens for s in strategies]
        # Row and column of each arm in the table of expected tokens; row 0 is a drafter that drafts nothing.
        self._table_index = ([0 if d is None else d + 1 for d in self.drafter_of], self.draft_tokens)
        self._tokens_per_request: np.ndarray | None = None  # computed when asked for

    def tokens_per_request(self) -> np.ndarray:
        """Expected tokens per request and step, of shape (arms,)."""
        if self._tokens_per_request is None:
            nothing = [1.0] * (max(self.draft_tokens) + 1)
            table = np.array([nothing, *[model.expected_tokens() for model in self.acceptance]])
            self._tokens_per_request = table[self._table_index]
        return self._tokens_per_request

    def tokens_per_s(self, batch_size: int, context_tokens: float) -> np.ndarray:
        """Predicted tokens per second, of shape (arms,)."""
        return batch_size * self.tokens_per_request() / self.step_time.predict(batch_size, context_tokens)

    def explain(self, batch_size: int, context_tokens: float) -> list[dict]:
        """The prediction in numbers, one row per arm in the order of the arms."""
        tokens: np.ndarray = batch_size * self.tokens_per_request()
        seconds = self.step_time.predict(batch_size, context_tokens)
        return [
            {
                "strategy": str(strategy),
                "predicted_tokens": float(tokens[arm]),
                "predicted_s": float(seconds[arm]),
                "predicted_tokens_per_s": float(tokens[arm] / seconds[arm]),
            }
            for arm, strategy in enumerate(self.strategies)
        ]

    def update(
        self,
        arm: int,
        batch_size: int,
        emitted_tokens: int,
        seconds: float,
        context_tokens: int,
        accepted_by_position: Sequence[float] | None,
    ) -> bool:
        """Learns from one step; `True` when the step-time fit changed."""
        drafter = self.drafter_of[arm]
        if drafter is not None:
            if accepted_by_position is None:
                accepted = max(0, emitted_tokens - batch_size)
                accepted_by_position = spread_accepted(batch_size, self.draft_tokens[arm], accepted)
            self.acceptance[drafter].update(batch_size, accepted_by_position)
            self._tokens_per_request = None
        return self.step_time.update(batch_size, arm, seconds, context_tokens)

    def forget_acceptance(self, keep: float) -> None:
        """Gives earlier observations less weight, because policy or drafter have changed."""
        for model in self.acceptance:
            model.forget(keep)
        self._tokens_per_request = None

    def state_dict(self) -> dict:
        return {
            "step_time": self.step_time.state_dict(),
            "acceptance": [model.state_dict() for model in self.acceptance],
        }

    def load_state_dict(self, state: dict) -> None:
        self.step_time.load_state_dict(state["step_time"])
        for model, saved in zip(self.acceptance, state["acceptance"], strict=True):
            model.load_state_dict(saved)
        self._tokens_per_request = None


class CostModelSelector(Selector):
    """
    Plays the arm with the best predicted tokens per second.

    "Off" is played once before the model is trusted. While off is winning, the best speculating arm is tried once per
    rollout: without drafts, nothing would ever show that the drafter has improved.

    Args:
        strategies (`Sequence[Strategy]`):
            The arms. "Off" is added when missing.
        bucket_edges (`Sequence[int]`):
            Upper edges of the batch buckets.
        rng (`random.Random`, *optional*, defaults to `random.Random(0)`):
            Not used; part of the common interface.
        min_dwell_steps (`int`, *optional*, defaults to `4`):
            Steps for which a choice is held within a bucket.
    """

    def __init__(
        self,
        strategies: Sequence[Strategy],
        bucket_edges: Sequence[int],
        rng: random.Random | None = None,
        min_dwell_steps: int = 4,
    ) -> None:
        super().__init__(with_off(strategies), bucket_edges, rng or random.Random(0), min_dwell_steps)
        self.model = CostModel(self.strategies, self.bucket_edges[-1])
        self._off_arm = self.strategies.index(Strategy.off())
        self._off_played = False
        self._probe_due = True

    def explain(self, batch_size: int, context_tokens: int = 0) -> list[dict]:
        """The numbers behind the choice, one row per arm, best first."""
        return sorted(self.model.explain(batch_size, context_tokens), key=lambda row: -row["predicted_tokens_per_s"])

    def expected_tokens_per_s(self, batch_size: int, context_tokens: float = 0) -> list[float | None]:
        return self.model.tokens_per_s(batch_size, context_tokens).tolist()

    def start_rollout(self) -> None:
        super().start_rollout()
        self._probe_due = True
        self.model.forget_acceptance(0.5)

    def _choose(self, bucket: int, batch_size: int, context_tokens: int) -> int:
        rates = self.model.tokens_per_s(batch_size, context_tokens)
        best = int(rates.argmax())
        if not self._off_played:
            self._off_played = True
            return self._off_arm
        if best == self._off_arm and self._probe_due and len(rates) > 1:
            self._probe_due = False
            rates[self._off_arm] = 0.0
            return int(rates.argmax())
        return best

    def _observe(self, bucket, arm, batch_size, emitted_tokens, seconds, context_tokens, accepted_by_position) -> None:
        self.model.update(arm, batch_size, emitted_tokens, seconds, context_tokens, accepted_by_position)

    def _predicted_tokens_per_s(self, bucket: int) -> list[float | None]:
        return self.model.tokens_per_s(self.bucket_edges[bucket], 0).tolist()

    def _state(self) -> dict:
        return {"model": self.model.state_dict(), "off_played": self._off_played, "probe_due": self._probe_due}

    def _load_state(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self._off_played, self._probe_due = state["off_played"], state["probe_due"]
