"""Training the drafter in the time that a rank waits (the Spot Trainer of TLT, arXiv 2511.16665)."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from ..drafter.drafter_trainer import DrafterTrainer
from .straggler_wait import StragglerWait


logger = logging.getLogger(__name__)

# Longest optimiser step wanted. The last one of a wait is abandoned, on a CPU half of it on average. An accelerator is
# asked while kernels are queued, which is soon over: there a step runs to its end, and whoever is waited for must not
# wait for longer than 100 ms himself.
MAX_STEP_S = 0.08

# Reward functions that take less time than this are left alone: they end before a step would, and beginning a period
# of training and giving back what it took is not free.
PATIENCE_S = 0.05

# Embedding and head of the policy.
Target = tuple[Tensor, Tensor]


def train_safely(
    trainer: DrafterTrainer,
    target: Target,
    seconds_budget: float = float("inf"),
    stop: Callable[[], bool] = lambda: False,
    max_step_s: float = float("inf"),
) -> dict[str, float]:
    """
    [`DrafterTrainer.train_for`] that never ends the run it serves: a policy's training is worth more than a drafter's.

    After an exception of any kind, such as an out-of-memory error, weights and optimiser are those from before the
    call, the traceback is logged and the call counts as one that trained nothing.

    Returns:
        `dict[str, float]`: What [`DrafterTrainer.train_for`] reports, and `failures` (0 or 1).
    """
    started = time.perf_counter()
    try:
        trainer.set_target(*target)
        report = trainer.train_for(seconds_budget, stop=stop, max_step_s=max_step_s) | {"failures": 0.0}
    except Exception:
        logger.exception("Drafter training failed; the drafter is the one from before, and the policy's run goes on.")
        trainer.restore_good_state()
        report = empty_report() | {"failures": 1.0, "seconds": time.perf_counter() - started}
    trainer.end_period()
    return report


def empty_report() -> dict[str, float]:
    """What [`train_safely`] reports when nothing was trained."""
    names = ("steps", "tokens", "dropped_batches", "failures", "starved", "interrupted", "seconds", "step_seconds")
    return dict.fromkeys(names, 0.0)


def train_until_all_finished(
    trainer: DrafterTrainer,
    wait: StragglerWait,
    target: Target,
    while_training: AbstractContextManager | None = None,
) -> dict[str, float]:
    """
    Trains the drafter one optimiser step at a time until the last rank has finished its rollout.

    It holds no collective, and the step that the end comes in is abandoned, so a rank that trains delays nobody by
    more than a part of a step. A buffer with nothing to learn from leaves a plain wait.

    Args:
        trainer ([`DrafterTrainer`]):
            Trainer of this rank's drafter.
        wait ([`StragglerWait`]):
            Announced for this rollout.
        target (`tuple[torch.Tensor, torch.Tensor]`):
            Embedding and head of the policy.
        while_training (`ContextManager`, *optional*):
            Entered for the time of the training.

    Returns:
        `dict[str, float]`: What [`train_safely`] reports, and `idle_s` (time until the last rank was done),
        `idle_used_s` (part of it inside optimiser steps that were not abandoned) and `stop_latency_s` (time by which
        training outlived the wait, memory given back).

    Raises:
        [`StragglerError`]: If a rank did not finish within the deadline.
    """
    started = time.perf_counter()
    report = empty_report()
    if not wait.all_finished():
        with nullcontext() if while_training is None else while_training:
            report = train_safely(trainer, target, stop=wait.all_finished, max_step_s=MAX_STEP_S)
    trained = time.perf_counter()
    wait.join()
    report["idle_s"] = max(0.0, wait.finished_at_s - started)
    report["stop_latency_s"] = max(0.0, trained - max(started, wait.finished_at_s))
    return report | {"idle_used_s": _used_seconds(report)}


def _used_seconds(report: Mapping[str, float]) -> float:
    """Seconds of a wait inside optimiser steps that came to something."""
    # A last step that was not abandoned began inside the wait and may have ended after it.
    overrun_s = 0.0 if report["interrupted"] else report["stop_latency_s"]
    return min(max(0.0, report["step_seconds"] - overrun_s), report["idle_s"])


class BackgroundTraining:
    """
    Trains the drafter in a thread while the process waits for something that needs no accelerator: reward functions,
    tools, environments.

    The thread has its own gradient mode and autocast state, draws from the drafter's own generator and touches nothing
    of the policy, so what runs beside it gives the same results. It takes time from Python code beside it all the
    same: the two share the interpreter lock and, on CPU, the cores.

    Args:
        train (`Callable[[Callable[[], bool]], dict[str, float]]`):
            Trains until its argument returns `True` and reports as [`train_safely`] does. Not called when there is
            less to wait for than 50 ms.
        report (`Callable[[dict[str, float]], None]`):
            Takes the report of every period, with `idle_s`, `idle_used_s` and `stop_latency_s`.
    """

    def __init__(
        self,
        train: Callable[[Callable[[], bool]], dict[str, float]],
        report: Callable[[dict[str, float]], None],
    ):
        self._train = train
        self._report = report
        self._thread: threading.Thread | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Trains for the time of the context."""
        self._start()
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside [`running`], does not train for the time of this context; elsewhere does nothing."""
        was_running = self._thread is not None
        if was_running:
            self._stop()
        try:
            yield
        finally:
            if was_running:
                self._start()

    def _start(self) -> None:
        self._stop_signal = threading.Event()
        self._result: dict[str, float] = {}
        self._started_s = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="tlt-trl drafter training", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_over = self._stop_signal.wait(PATIENCE_S)
        self._result = empty_report() if is_over else self._train(self._stop_signal.is_set)

    def _stop(self) -> None:
        stopped = time.perf_counter()
        self._stop_signal.set()
        self._thread.join()
        self._thread = None
        # No report: the thread has died, with a traceback. Raising here would hide an error of what ran beside it.
        result = self._result or empty_report() | {"failures": 1.0}
        idle_s, latency_s = stopped - self._started_s, time.perf_counter() - stopped
        result = result | {"idle_s": idle_s, "stop_latency_s": latency_s}
        self._report(result | {"idle_used_s": _used_seconds(result)})
