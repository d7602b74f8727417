"""What a step of a run that speculates brought and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


# Draft tokens below which a rollout says too little about acceptance.
MIN_DRAFT_TOKENS = 256


@dataclass(frozen=True)
class StepAccount:
    """
    What one training rollout, and the step around it, brought and cost. Seconds are means over ranks, those that hold
    up all ranks are of the slowest; all ranks have the same account.

    Attributes:
        step_s (`float`):
            From rollout to rollout, without evaluations.
        saved_s (`float`):
            By which the rollout would have been longer without speculation; negative if it was slower. 0.0 where
            nothing could be priced.
        training_s (`float`):
            Drafter training outside of waits.
        merging_s (`float`):
            By which training outlasted waits, and merging drafters.
        capture_s (`float`), push_s (`float`):
            Copying hidden states, and loading the drafter into the engine.
        free_s (`float`):
            Drafter training inside waits.
        tokens (`float`):
            Trained on, by all ranks.
        expected_length (`float`, *optional*):
            Tokens per verification that the drafter is expected to reach on its training batches; `None` if it was not
            trained.
        first_acceptance (`float`, *optional*):
            Share of the drafter's first tokens that the rollout accepted; `None` if there were too few.
        optimizer_step_s (`float`):
            Of the drafter, as estimated; 0.0 before the first.
        was_starved (`bool`):
            Whether there was nothing to train on.
    """

    step_s: float
    saved_s: float = 0.0
    training_s: float = 0.0
    merging_s: float = 0.0
    capture_s: float = 0.0
    push_s: float = 0.0
    free_s: float = 0.0
    tokens: float = 0.0
    expected_length: float | None = None
    first_acceptance: float | None = None
    optimizer_step_s: float = 0.0
    was_starved: bool = False

    @property
    def side_costs_s(self) -> float:
        """What goes with training."""
        return self.merging_s + self.capture_s + self.push_s

    @property
    def spent_s(self) -> float:
        return self.training_s + self.side_costs_s

    @property
    def net_s(self) -> float:
        return self.saved_s - self.spent_s

    @classmethod
    def of(
        cls, total: Mapping[str, float], num_ranks: int, has_waits: bool, rollout: Mapping[str, float] | None
    ) -> StepAccount:
        """
        The account of a step that has ended.

        Args:
            total (`Mapping[str, float]`):
                Sums over ranks of what a `TrainingReport` counts, of `feature_capture_s`, `step_s` and
                `acceptance_length` (over optimiser steps); maxima of `training_s`, `idle_added_s`,
                `background_latency_s` and `optimizer_step_s`.
            num_ranks (`int`):
                Number of ranks.
            has_waits (`bool`):
                Whether ranks wait for each other.
            rollout (`Mapping[str, float]`, *optional*):
                Metrics of its rollout.
        """
        steps = total["steps"]
        merging_s = total["background_latency_s"]
        if has_waits:
            # From the end of the wait until drafters were merged, with the training in between.
            merging_s = max(0.0, total["idle_added_s"] - total["training_s"])
        return cls(
            step_s=total["step_s"] / num_ranks,
            saved_s=0.0 if rollout is None else rollout["tlt/speculation/saved_s"],
            training_s=total["training_s"],
            merging_s=merging_s,
            capture_s=total["feature_capture_s"] / num_ranks,
            push_s=0.0 if rollout is None else rollout["tlt/sync/drafter_s"],
            free_s=total["idle_used_s"] / num_ranks,
            tokens=total["tokens"],
            expected_length=total["acceptance_length"] / steps if steps else None,
            first_acceptance=None if rollout is None else first_acceptance(rollout),
            optimizer_step_s=total["optimizer_step_s"],
            was_starved=bool(total["starved"]) and not steps,
        )


def first_acceptance(rollout: Mapping[str, float]) -> float | None:
    """Share of the drafter's first tokens that a rollout with these metrics accepted; `None` if it had too few."""
    if rollout["tlt/draft_tokens/proposed"] < MIN_DRAFT_TOKENS:
        return None
    return rollout["tlt/acceptance/position_1"]
