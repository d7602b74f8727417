"""
Step-time model and acceptance model, and the strategy with the best predicted tokens per second: the rule of RLHFSpec
(arXiv 2512.04752), which publishes the idea but no formulas; the formulas here are our own.

    seconds  = c0 + c1 * batch + c2 * verified tokens + c3 * context tokens + c_method * draft tokens
    tokens   = batch * (1 + p1 + p1 p2 + ...)          p_i: acceptance of draft token i given that i - 1 was accepted
    choice   = argmax tokens / seconds
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import exp, log

import numpy as np

from .acceptance import AcceptanceModel, spread_accepted
from .selector import Selector, SlidingMedian
from .strategy import Strategy, with_off


class StepTimeModel:
    """
    Seconds of a step, linear in its features, fitted to one robust row per (batch size, arm).

    A row is the lower median of its last `row_window` steps, so that neither spikes nor compilation reach the fit, and
    rare shapes weigh as much as frequent ones. Rows are divided by a running estimate of the machine's slow drift. The
    fit minimises squared *relative* errors, is pulled weakly to a prior, reweights outlying rows (Huber) and drops
    coefficients that come out negative.

    Args:
        strategies (`Sequence[Strategy]`):
            The arms.
        max_batch_size (`int`):
            Largest batch.
        row_window (`int`, *optional*, defaults to `9`):
            Steps kept per row.
        refit_steps (`int`, *optional*, defaults to `16`):
            Steps between fits.
    """

    # Seconds relative to an empty step: base, per request, per verified token, per context token, per draft token.
    PRIOR = (1.0, 0.01, 0.02, 1e-6, 0.1)
    # Squared ratio of the noise of a row (5 %) to the trust in the prior (a factor of about 3).
    RIDGE = (0.05 / 2.0) ** 2
    import os; DRIFT=float(os.environ.get('DR','0.03'))
    HUBER = 0.15  # relative error above which a row weighs less

    def __init__(
        self, strategies: Sequence[Strategy], max_batch_size: int, row_window: int = 9, refit_steps: int = 16
    ) -> None:
        self.row_window = row_window
        self.refit_steps = refit_steps
        self.draft_tokens = np.array([s.num_draft_tokens for s in strategies], dtype=float)  # shape (arms,)
        self.methods = sorted({(s.method, s.draft_sampling) for s in strategies if not s.is_off})
        # Draft tokens in the column of the arm's drafter, shape (arms, drafters).
        self.draft_columns = np.array(
            [[s.num_draft_tokens * ((s.method, s.draft_sampling) == m) for m in self.methods] for s in strategies],
            dtype=float,
        ).reshape(len(strategies), len(self.methods))
        self.prior = np.array([*self.PRIOR[:4], *[self.PRIOR[4]] * len(self.methods)])
        self.coefficients = self.prior * 1e-2  # a step of 10 ms until something is measured
        shape = (max_batch_size + 1, len(strategies))
        self.rows: dict[tuple[int, int], SlidingMedian] = {}
        self.row_seconds = np.zeros(shape)  # 0.0 where nothing was seen
        self.row_context = np.zeros(shape)
        self.row_count = np.zeros(shape)
        self.log_errors = None
        self.log_drift = 0.0
        self.steps = 0

    def features(self, batch_size: int, context_tokens: float) -> np.ndarray:
        """Features of all arms at one batch size, of shape (arms, 4 + drafters)."""
        columns = np.empty((len(self.draft_tokens), 4 + len(self.methods)))
        columns[:, 0] = 1.0
        columns[:, 1] = batch_size
        columns[:, 2] = batch_size * (self.draft_tokens + 1.0)
        columns[:, 3] = context_tokens
        columns[:, 4:] = self.draft_columns
        return columns

    def predict(self, batch_size: int, context_tokens: float) -> np.ndarray:
        """Seconds per step of all arms on the machine as it is now, of shape (arms,)."""
        return self.features(batch_size, context_tokens) @ (self.coefficients * np.exp(self.log_drift))

    def update(self, batch_size: int, arm: int, seconds: float, context_tokens: float) -> bool:
        """Learns from one step; `True` when the fit changed."""
        key = (batch_size, arm)
        row = self.rows.setdefault(key, SlidingMedian(self.row_window))
        seconds *= exp(-self.log_drift)
        if len(row) >= 3:
            change = log(seconds / row.median())
            self.log_drift += self.DRIFT * min(max(change, -0.3), 0.3)
        row.append(seconds)
        self.row_count[key] = len(row)
        self.row_seconds[key] = row.median()
        self.row_context[key] += (context_tokens - self.row_context[key]) / len(row)
        self.steps += 1
        if self.steps % self.refit_steps and self.steps > self.refit_steps:
            return False
        self.fit()
        return True

    def fit(self) -> None:
        """Weighted ridge regression of all rows, with three rounds of Huber weights."""
        batches, arms = np.nonzero(self.row_count)
        seconds = self.row_seconds[batches, arms]
        x = np.column_stack(
            [
                np.ones(len(arms)),
                batches,
                batches * (self.draft_tokens[arms] + 1.0),
                self.row_context[batches, arms],
                self.draft_columns[arms],
            ]
        )
        prior = self.prior * np.median(seconds / (x @ self.prior))
        count = self.row_count[batches, arms]
        # In units of the prior and of the row: the target of every row is 1, and so is the prior of every coefficient.
        x = x * prior / seconds[:, None]
        weights = count / (count + 1.0)
        for _ in range(3):
            solution = _nonnegative_ridge(x, weights, self.RIDGE)
            errors = np.abs(x @ solution - 1.0)
            weights = count / (count + 1.0) * np.minimum(1.0, self.HUBER / np.maximum(errors, 1e-9))
        self.coefficients = solution * prior
        self.log_errors = (batches, arms, count, np.log(seconds / (x @ solution * seconds)))

    def state_dict(self) -> dict:
        return {
            "rows": [
                [batch, arm, row.values(), float(self.row_context[batch, arm])]
                for (batch, arm), row in self.rows.items()
            ],
            "coefficients": self.coefficients.tolist(),
            "log_drift": self.log_drift,
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict) -> None:
        self.rows = {}
        for table in (self.row_seconds, self.row_context, self.row_count):
            table[:] = 0.0
        for batch, arm, values, context in state["rows"]:
            row = self.rows[batch, arm] = SlidingMedian(self.row_window, values)
            self.row_seconds[batch, arm], self.row_count[batch, arm] = row.median(), len(row)
            self.row_context[batch, arm] = context
        self.coefficients = np.array(state["coefficients"])
        self.log_drift, self.steps = state["log_drift"], state["steps"]


def _nonnegative_ridge(x: np.ndarray, weights: np.ndarray, ridge: float) -> np.ndarray:
    """argmin of sum(weights * (x @ c - 1)**2) + ridge * sum((c - 1)**2), dropping the most negative `c` in turn."""
    gram = (x * weights[:, None]).T @ x + ridge * np.eye(x.shape[1])
    target = weights @ x + ridge
    solution, active = np.zeros(x.shape[1]), np.ones(x.shape[1], dtype=bool)
    while True:
        solution[:] = 0.0
        solution[active] = np.linalg.solve(gram[np.ix_(active, active)], target[active])
        if solution.min() >= 0.0:
            return solution
        active[solution.argmin()] = False


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
        self.step_time = StepTimeModel(strategies, max_batch_size)
        longest = max(s.num_draft_tokens for s in strategies)
        self.acceptance = [AcceptanceModel(longest) for _ in self.step_time.methods]
        methods = self.step_time.methods
        # Acceptance model of each arm; off has none.
        self.drafter_of = [None if s.is_off else methods.index((s.method, s.draft_sampling)) for s in strategies]
        self.draft_tokens = [s.num_draft_tokens for s in strategies]
        self._tokens_per_request: np.ndarray | None = None  # computed when asked for

    def tokens_per_request(self) -> np.ndarray:
        """Expected tokens per request and step, of shape (arms,)."""
        if self._tokens_per_request is None:
            expected = [model.expected_tokens() for model in self.acceptance]
            arms = zip(self.drafter_of, self.draft_tokens, strict=True)
            self._tokens_per_request = np.array([1.0 if d is None else expected[d][k] for d, k in arms])
        return self._tokens_per_request

    def tokens_per_s(self, batch_size: int, context_tokens: float) -> np.ndarray:
        """Predicted tokens per second, of shape (arms,)."""
        return batch_size * self.tokens_per_request() / self.step_time.predict(batch_size, context_tokens)

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
        """Policy or drafter have moved: trusts what was accepted before less."""
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

    "Off" is played once before the model is trusted, and once per rollout the best speculating arm is probed when off
    is winning: without drafts nothing would ever tell that the drafter improved.

    Args:
        strategies (`Sequence[Strategy]`):
            The arms. "Off" is added when missing.
        bucket_edges (`Sequence[int]`):
            Upper edges of the batch buckets.
        rng (`random.Random`, *optional*, defaults to `random.Random(0)`):
            Not drawn from; part of the common interface.
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
        tokens = batch_size * self.model.tokens_per_request()
        seconds = self.model.step_time.predict(batch_size, context_tokens)
        rows = [
            {
                "strategy": str(strategy),
                "predicted_tokens": float(tokens[arm]),
                "predicted_seconds": float(seconds[arm]),
                "predicted_tokens_per_s": float(tokens[arm] / seconds[arm]),
            }
            for arm, strategy in enumerate(self.strategies)
        ]
        return sorted(rows, key=lambda row: -row["predicted_tokens_per_s"])

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
