"""
Alarms for faults that would otherwise go unnoticed: verification keeps the text right, however bad the drafter is.

A typical fault is a run that becomes slower because no draft token is accepted any more. Each alarm logs one warning,
which says what to do, and is a metric (`tlt/alarm/<name>`) while it lasts.
"""

import copy
import logging
from typing import Any


logger = logging.getLogger(__name__)

COLLAPSED_ACCEPTANCE_LENGTH = 1.05
COLLAPSE_PATIENCE_ROLLOUTS = 5
STALE_PATIENCE_ROLLOUTS = 2
STARVED_PATIENCE_ROLLOUTS = 3

ADVICE = {
    "acceptance_collapse": (
        "Next to none of the drafter's tokens is accepted. If the run has just begun without "
        "`drafter_model_name_or_path`, the drafter has not learnt enough yet: warm one up with `tlt-trl warmup`. If "
        "acceptance was good before, look at tlt/drafter/loss and raise `drafter_learning_rate`. Speculation is "
        "switched off where it does not pay."
    ),
    "drafter_mismatch": (
        "The engine's drafter is not the one that was pushed. Speculation is off until a sync succeeds; please report "
        "the vLLM version and the model's name."
    ),
    "drafter_stale": (
        "The engine has drafted with an old drafter for several rollouts: weights were not synced although the "
        "drafter was trained. Was `sync_weights` replaced or skipped?"
    ),
    "drafter_training_failed": (
        "The drafter is the one from before the fault, and the policy's training is not affected. Out of memory: "
        "lower `vllm_gpu_memory_utilization`. Losses that are not finite: lower `drafter_learning_rate`. "
        "`drafter_training=False` goes on with the drafter as it is."
    ),
    "drafter_untrained": (
        "The drafter falls behind the policy. Raise `drafter_time_budget` if it is what limits training, "
        "or warm a drafter up with `tlt-trl warmup`."
    ),
    "not_paying": (
        "Speculation and the drafter's training have cost more than they saved. The run goes on without both, and "
        "tries again after a number of rollouts that doubles every time. A better drafter helps (`tlt-trl warmup`); "
        "where rollouts are a small part of a step or answers are hard to predict, nothing will."
    ),
    "drafter_starved": (
        "There was time to train the drafter and nothing to train it on: the feature buffer is empty or holds no "
        "answer long enough to predict a token of. Are answers cut to nothing, or `feature_buffer_tokens` shorter "
        "than one of them?"
    ),
    "drafter_not_saved": (
        "The run goes on, the policy's checkpoint is not affected, and the next save tries again. A run that is "
        "resumed from here takes the drafter of an older checkpoint. If the disk is full, make room; most bytes are "
        "the feature buffer's (`feature_buffer_tokens`), and `save_only_model=True` saves none of them."
    ),
}


class Alarms:
    """State of all alarms of one run; says which are active and warns when one begins."""

    def __init__(self):
        self.active: dict[str, bool] = dict.fromkeys(ADVICE, False)
        self._collapsed_rollouts = 0
        self._stale_rollouts = 0
        self._starved_rollouts = 0
        self._has_observed_training = False

    def set(self, name: str, active: bool, detail: str = "") -> None:
        """Begins or ends an alarm."""
        if active and not self.active[name]:
            logger.warning("ALARM %s. %s %s", name, detail, ADVICE[name])
        self.active[name] = active

    def observe_rollout(self, acceptance_length: float, draft_tokens: float, drafter_lag: int) -> None:
        """
        Records one training rollout.

        Args:
            acceptance_length (`float`):
                Tokens emitted per verification.
            draft_tokens (`float`):
                Draft tokens verified; a rollout without any says nothing about acceptance.
            drafter_lag (`int`):
                How many versions the engine's drafter is behind the trainer's.
        """
        if draft_tokens:
            collapsed = acceptance_length < COLLAPSED_ACCEPTANCE_LENGTH
            self._collapsed_rollouts = self._collapsed_rollouts + 1 if collapsed else 0
        self.set(
            "acceptance_collapse",
            self._collapsed_rollouts >= COLLAPSE_PATIENCE_ROLLOUTS,
            f"Acceptance length {acceptance_length:.3f} in the last of {self._collapsed_rollouts} rollouts.",
        )
        self._stale_rollouts = self._stale_rollouts + 1 if drafter_lag > 0 else 0
        self.set("drafter_stale", self._stale_rollouts >= STALE_PATIENCE_ROLLOUTS, f"{drafter_lag} versions behind.")

    def observe_training(self, starved: float, steps: float, dropped_batches: float, failures: float) -> None:
        """
        Records the drafter training of all ranks in one step.

        Args:
            starved (`float`):
                Periods of training that had time, but nothing to train on. The first step does not count: there are
                no features before the first rollout has been scored.
            steps (`float`):
                Optimiser steps taken.
            dropped_batches (`float`):
                Batches whose loss or gradient was not finite.
            failures (`float`):
                Periods of training that ended with an exception.
        """
        self.set(
            "drafter_training_failed",
            dropped_batches > 0 or failures > 0,
            f"{failures:.0f} exceptions (traceback above, on the rank where it happened), {dropped_batches:.0f} "
            "batches dropped.",
        )
        is_starved = self._has_observed_training and starved > 0 and not (steps or dropped_batches or failures)
        self._has_observed_training = True
        self._starved_rollouts = self._starved_rollouts + 1 if is_starved else 0
        self.set("drafter_starved", self._starved_rollouts >= STARVED_PATIENCE_ROLLOUTS)

    def metrics(self) -> dict[str, float]:
        """`tlt/alarm/<name>`: 1.0 while active, else 0.0."""
        return {f"tlt/alarm/{name}": float(active) for name, active in self.active.items()}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to warn when the unbroken run would."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        vars(self).update(copy.deepcopy(state))
        # What could be loaded was saved, and the alarms of an older version were fewer.
        self.active = dict.fromkeys(ADVICE, False) | self.active | {"drafter_not_saved": False}
