"""How long a whole step takes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StepClock:
    """
    Seconds from step to step, of the run's own time: neither evaluations nor pauses between two runs count.

    Args:
        clock (`Callable[[], float]`, *optional*, defaults to `time.perf_counter`):
            Monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._since_s: float | None = None
        self._uncounted_depth = 0
        self._uncounted_since_s = 0.0

    def start_run(self) -> None:
        """Begins anew: the time since the last step of an earlier run was not this run's."""
        self._since_s = None

    def start(self) -> None:
        """Begins to count, unless it is counting; nothing is known of the time before the first rollout."""
        if self._since_s is None:
            self._since_s = self._clock()

    def lap(self) -> float:
        """Seconds since the last lap, or since the start; 0.0 where nothing was started."""
        now_s = self._clock()
        seconds = 0.0 if self._since_s is None else now_s - self._since_s
        self._since_s = now_s
        return seconds

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Time inside does not count. May be nested, as evaluations on several sets are."""
        if not self._uncounted_depth:
            self._uncounted_since_s = self._clock()
        self._uncounted_depth += 1
        try:
            yield
        finally:
            self._uncounted_depth -= 1
            if self._since_s is not None and not self._uncounted_depth:
                self._since_s += self._clock() - self._uncounted_since_s

    def state_dict(self) -> dict[str, Any]:
        # A clock starts anew with its process, so a time that has passed is saved and not a moment. A checkpoint is
        # saved inside `uncounted`.
        now_s = self._uncounted_since_s if self._uncounted_depth else self._clock()
        return {"since_lap_s": None if self._since_s is None else now_s - self._since_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with what `state_dict` returned."""
        since_s = state["since_lap_s"]
        self._since_s = None if since_s is None else self._clock() - since_s
