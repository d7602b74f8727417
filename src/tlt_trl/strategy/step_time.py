"""
Seconds of an engine step as a function of its shape, fitted while the engine runs: one half of cost_model.py.

    seconds  = c0 + c1 * batch + c2 * verified tokens + c3 * context tokens
               + (c4 + c_drafter * draft tokens if speculating)

c4 is what any speculating step costs, such as rejection sampling. Without it, a slow step with one draft token would
make longer drafts look hopeless.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import numpy as np

from .selector import SlidingMedian
from .strategy import Strategy


class StepTimeModel:
    """
    Seconds of a step, linear in its features, fitted to one robust row per (batch size, arm).

    A row is the lower median of its last `row_window` steps, so that neither spikes nor compilation reach the fit, and
    rare shapes weigh as much as frequent ones. Steps are divided by a running estimate of the machine's slow drift
    before they enter a row, so that a row measured in a slow minute does not look like a slow arm. The fit minimises
    squared *relative* errors, is pulled weakly to a prior, reweights outlying rows (Huber) and drops coefficients that
    come out negative.

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

    # Seconds relative to an empty step: base, per request, per verified token, per context token, speculating at all,
    # per draft token.
    PRIOR = (1.0, 0.01, 0.02, 1e-6, 0.1, 0.1)
    # Squared ratio of the noise of a row (5 %) to the trust in the prior (a factor of about 3).
    RIDGE = (0.05 / 2.0) ** 2
    HUBER = 0.15  # relative error above which a row weighs less
    DRIFT = 0.03  # share of a step's deviation from its row that is taken for drift of the machine

    def __init__(
        self, strategies: Sequence[Strategy], max_batch_size: int, row_window: int = 9, refit_steps: int = 16
    ) -> None:
        self.row_window = row_window
        self.refit_steps = refit_steps
        self.draft_tokens = np.array([s.num_draft_tokens for s in strategies], dtype=float)  # shape (arms,)
        self.speculating = (self.draft_tokens > 0).astype(float)
        self.methods = sorted({(s.method, s.draft_sampling) for s in strategies if not s.is_off})
        # Draft tokens in the column of the arm's drafter, shape (arms, drafters).
        self.draft_columns = np.array(
            [[s.num_draft_tokens * ((s.method, s.draft_sampling) == m) for m in self.methods] for s in strategies],
            dtype=float,
        ).reshape(len(strategies), len(self.methods))
        self.prior = np.array([*self.PRIOR[:5], *[self.PRIOR[5]] * len(self.methods)])
        self.log_drift = 0.0
        self.steps = 0
        self.rows: dict[tuple[int, int], SlidingMedian] = {}
        shape = (max_batch_size + 1, len(strategies))
        self.row_s = np.zeros(shape)  # 0.0 where nothing was seen
        self.row_context = np.zeros(shape)
        self.row_count = np.zeros(shape)
        self._set_coefficients(self.prior * 1e-2)  # a step of 10 ms until something is measured

    def _set_coefficients(self, coefficients: np.ndarray) -> None:
        self.coefficients = coefficients  # shape (5 + drafters,)
        # shape (arms,)
        self._draft_s = self.speculating * coefficients[4] + self.draft_columns @ coefficients[5:]

    def predict(self, batch_size: int, context_tokens: float) -> np.ndarray:
        """Seconds per step of all arms on the machine as it is now, of shape (arms,)."""
        base, per_request, per_verified, per_context = self.coefficients[:4].tolist()
        same = base + per_request * batch_size + per_context * context_tokens
        seconds = same + per_verified * batch_size * (self.draft_tokens + 1.0) + self._draft_s
        return seconds * exp(self.log_drift)

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
        self.row_s[key] = row.median()
        self.row_context[key] += (context_tokens - self.row_context[key]) / len(row)
        self.steps += 1
        if self.steps % self.refit_steps and self.steps > self.refit_steps:
            return False
        self.fit()
        return True

    def fit(self) -> None:
        """Weighted ridge regression of all rows, with three rounds of Huber weights."""
        batches, arms = np.nonzero(self.row_count)
        seconds, x = self.row_s[batches, arms], self._row_features(batches, arms)
        prior = self.prior * np.median(seconds / (x @ self.prior))
        # In units of the prior and of the row: the target of every row is 1, and so is the prior of every coefficient.
        x = x * prior / seconds[:, None]
        trust = self.row_count[batches, arms] / (self.row_count[batches, arms] + 1.0)
        weights = trust
        for _ in range(3):
            solution = nonnegative_ridge(x, weights, self.RIDGE)
            errors = np.abs(x @ solution - 1.0)
            weights = trust * np.minimum(1.0, self.HUBER / np.maximum(errors, self.HUBER))
        self._set_coefficients(solution * prior)

    def _row_features(self, batches: np.ndarray, arms: np.ndarray) -> np.ndarray:
        """Features of the rows `(batches[i], arms[i])`, of shape (rows, 5 + drafters)."""
        verified = batches * (self.draft_tokens[arms] + 1.0)
        context = self.row_context[batches, arms]
        columns = [np.ones(len(arms)), batches, verified, context, self.speculating[arms], self.draft_columns[arms]]
        return np.column_stack(columns)

    def log_residuals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Batch size, arm, steps and log(measured / predicted seconds) of every row, each of shape (rows,)."""
        batches, arms = np.nonzero(self.row_count)
        predicted = self._row_features(batches, arms) @ self.coefficients
        return batches, arms, self.row_count[batches, arms], np.log(self.row_s[batches, arms] / predicted)

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
        for table in (self.row_s, self.row_context, self.row_count):
            table[:] = 0.0
        for batch, arm, values, context in state["rows"]:
            row = self.rows[batch, arm] = SlidingMedian(self.row_window, values)
            self.row_s[batch, arm], self.row_count[batch, arm] = row.median(), len(row)
            self.row_context[batch, arm] = context
        self._set_coefficients(np.array(state["coefficients"]))
        self.log_drift, self.steps = state["log_drift"], state["steps"]


def nonnegative_ridge(x: np.ndarray, weights: np.ndarray, ridge: float) -> np.ndarray:
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
