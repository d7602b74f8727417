"""What a step and a period of drafter training did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


class StepOutcome(Enum):
    """How an optimiser step of the drafter ended."""

    TRAINED = "trained"
    STARVED = "starved"  # there was nothing to train on
    DROPPED = "dropped"  # loss or gradient was not finite; the weights are the last good ones
    INTERRUPTED = "interrupted"  # abandoned on request; the weights are as before


@dataclass(frozen=True)
class StepResult:
    """
    Attributes:
        outcome (`StepOutcome`):
            How the step ended.
        tokens (`int`):
            Tokens trained on.
        metrics (`dict[str, float]`):
            Of a step that trained: `loss`, `grad_norm`, `acceptance_length`, and `loss_i` and `acceptance_i` for every
            draft step i from 1.
    """

    outcome: StepOutcome
    tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_trained(self) -> bool:
        return self.outcome is StepOutcome.TRAINED


# Of several periods, or of several ranks, the largest counts.
MAXIMA = ("stop_latency_s", "idle_added_s")


@dataclass(frozen=True)
class TrainingReport:
    """
    What one or several periods of drafter training did. Reports add up, over periods and over ranks.

    Attributes:
        steps (`int`):
            Optimiser steps.
        tokens (`int`):
            Tokens trained on.
        dropped_batches (`int`):
            Batches whose loss or gradient was not finite.
        interrupted (`int`):
            Optimiser steps that were abandoned.
        starved (`int`):
            Periods that had time and nothing to train on.
        failures (`int`):
            Periods that ended with an exception.
        time_s (`float`):
            Time spent on training.
        step_time_s (`float`):
            Part of it inside optimiser steps that were not abandoned.
        idle_s (`float`):
            Time waited for something else.
        idle_used_s (`float`):
            Part of it inside optimiser steps that were not abandoned.
        stop_latency_s (`float`):
            Longest time by which training outlived the wait.
        idle_added_s (`float`):
            Longest time from the end of the wait until drafters were merged.
        metric_sums (`dict[str, float]`):
            Sums over `steps` of the steps' metrics.
    """

    steps: int = 0
    tokens: int = 0
    dropped_batches: int = 0
    interrupted: int = 0
    starved: int = 0
    failures: int = 0
    time_s: float = 0.0
    step_time_s: float = 0.0
    idle_s: float = 0.0
    idle_used_s: float = 0.0
    stop_latency_s: float = 0.0
    idle_added_s: float = 0.0
    metric_sums: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: TrainingReport) -> TrainingReport:
        mine, others = self.numbers(), other.numbers()
        merged: dict[str, Any] = {name: mine[name] + others[name] for name in mine}
        merged |= {name: max(mine[name], others[name]) for name in MAXIMA}
        names = dict.fromkeys([*self.metric_sums, *other.metric_sums])
        sums = {name: self.metric_sums.get(name, 0.0) + other.metric_sums.get(name, 0.0) for name in names}
        return TrainingReport(**merged, metric_sums=sums)

    def numbers(self) -> dict[str, float]:
        """All but the metrics, by name."""
        return {spec.name: vars(self)[spec.name] for spec in fields(self) if spec.name != "metric_sums"}

    def means(self) -> dict[str, float]:
        """Metrics, as means over the steps; empty without steps."""
        return {name: total / self.steps for name, total in self.metric_sums.items()} if self.steps else {}
