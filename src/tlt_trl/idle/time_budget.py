"""How long one process, which waits for nobody, may train its drafter after a rollout."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class TimeBudget:
    """
    A share of the time between the ends of two rollouts.

    What is left of the share is carried over, so that optimiser steps longer than one rollout's share are still taken,
    only less often. Only the run's own time counts: neither evaluations nor pauses between two runs earn anything.

    Args:
        share (`float`):
            Share of the time, at least 0.
        clock (`Callable[[], float]`, *optional*, defaults to `time.perf_counter`):
            Monotonic clock in seconds.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter):
        self.share = share
        self._clock = clock
        self._last_end_s: float | None = None
        self._credit_s = 0.0
        self._uncounted_depth = 0

    def start_run(self) -> None:
        """Begins anew: the time since the last rollout of an earlier run was not this run's."""
        self._last_end_s = None
        self._credit_s = 0.0

    def earn(self, rollout_started_s: float) -> float:
        """
        Adds the share of the time since the last rollout ended, or since `rollout_started_s` in the first one.

        Returns:
            `float`: Seconds that may be spent now.
        """
        since_s = rollout_started_s if self._last_end_s is None else self._last_end_s
        self._credit_s += self.share * (self._clock() - since_s)
        return self._credit_s

    def spend(self, seconds: float, was_starved: bool) -> None:
        """Ends a rollout in which so much was spent."""
        self._last_end_s = self._clock()
        # Time in which there was nothing to train on must not come back as one long pause.
        self._credit_s = 0.0 if was_starved else self._credit_s - seconds

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Time inside earns nothing. May be nested, as evaluations on several sets are."""
        began = self._clock()
        self._uncounted_depth += 1
        try:
            yield
        finally:
            self._uncounted_depth -= 1
            if self._last_end_s is not None and not self._uncounted_depth:
                self._last_end_s += self._clock() - began

    def state_dict(self) -> dict[str, Any]:
        # A clock starts anew with its process, so a time that has passed is saved and not a moment.
        since_s = None if self._last_end_s is None else self._clock() - self._last_end_s
        return {"credit_s": self._credit_s, "since_rollout_s": since_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with what `state_dict` returned."""
        self._credit_s = state["credit_s"]
        since_s = state["since_rollout_s"]
        self._last_end_s = None if since_s is None else self._clock() - since_s
