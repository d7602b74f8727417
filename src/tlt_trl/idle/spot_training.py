"""Training the drafter in the time that a rank waits (the Spot Trainer of TLT, arXiv 2511.16665)."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from ..drafter.drafter_trainer import DrafterTrainer
from ..drafter.training_report import TrainingReport
from .straggler_wait import StragglerWait


logger = logging.getLogger(__name__)

# Longest optimiser step wanted. The last one of a wait is abandoned, on a CPU half of it on average. An accelerator is
# asked while kernels are queued, which is soon over: there a step runs to its end, and whoever is waited for must not
# wait for longer than 100 ms himself.
MAX_STEP_S = 0.08

# Reward functions that take less time than this are left alone: they end before a step would, and beginning a period
# of training and giving back what it took is not free.
PATIENCE_S = 0.05

# Embedding and head of the policy, each of shape (vocab_size, hidden_size).
PolicyCopy = tuple[Tensor, Tensor]


class Guests(Protocol):
    """Unfinished samples of other ranks, which a rank that waits may run."""

    def stand_by(self) -> None:
        """From now on they may come."""

    def has_work(self) -> bool:
        """Whether some have come; never blocks."""

    def serve(self) -> None:
        """Runs them."""

    def rest(self) -> None:
        """Waits a moment for them."""


def train_safely(
    trainer: DrafterTrainer,
    policy: PolicyCopy,
    budget_s: float = float("inf"),
    stop: Callable[[], bool] = lambda: False,
    max_step_s: float = float("inf"),
) -> TrainingReport:
    """
    [`DrafterTrainer.train_for`] that never ends the run it serves: a policy's training is worth more than a drafter's.

    After an exception of any kind, such as an out-of-memory error, weights and optimiser are those from before the
    call, the traceback is logged and the call counts as one that trained nothing.
    """
    started = time.perf_counter()
    try:
        trainer.set_policy(*policy)
        report = trainer.train_for(budget_s, stop=stop, max_step_s=max_step_s)
    except Exception:
        logger.exception("Drafter training failed; the drafter is the one from before, and the policy's run goes on.")
        trainer.restore_good_state()
        report = TrainingReport(failures=1, time_s=time.perf_counter() - started)
    trainer.end_period()
    return report


def train_until_all_finished(
    trainer: DrafterTrainer,
    wait: StragglerWait,
    policy: PolicyCopy,
    while_training: Callable[[], AbstractContextManager] = nullcontext,
    guests: Guests | None = None,
) -> TrainingReport:
    """
    Trains the drafter one optimiser step at a time until the last rank has finished its rollout.

    Samples of other ranks come first: they end the wait sooner.

    It holds no collective, and the step that the end comes in is abandoned, so a rank that trains delays nobody by
    more than a part of a step. A buffer with nothing to learn from leaves a plain wait.

    Args:
        trainer ([`DrafterTrainer`]):
            Trainer of this rank's drafter.
        wait ([`StragglerWait`]):
            Announced for this rollout.
        policy (`tuple[torch.Tensor, torch.Tensor]`):
            Embedding and head of the policy.
        while_training (`Callable[[], ContextManager]`, *optional*):
            Entered for the time of the training.
        guests ([`Guests`], *optional*):
            Samples that other ranks may send; the time in which they run does not count as waited.

    Returns:
        [`TrainingReport`]: With the time waited, used and outlived.

    Raises:
        [`StragglerError`]: If a rank did not finish within the deadline.
    """
    started = time.perf_counter()
    report, served_s = TrainingReport(), 0.0
    if guests is None:
        if not wait.all_finished():
            with while_training():
                report = train_safely(trainer, policy, stop=wait.all_finished, max_step_s=MAX_STEP_S)
    else:
        report, served_s = _train_and_serve(trainer, wait, policy, while_training, guests)
    trained = time.perf_counter()
    wait.join()
    return with_idle_time(
        report,
        idle_s=max(0.0, wait.finished_at_s - started - served_s),
        stop_latency_s=max(0.0, trained - max(started, wait.finished_at_s)),
    )


def _train_and_serve(
    trainer: DrafterTrainer,
    wait: StragglerWait,
    policy: PolicyCopy,
    while_training: Callable[[], AbstractContextManager],
    guests: Guests,
) -> tuple[TrainingReport, float]:
    """What was trained between guests, and the seconds in which they ran."""
    report, served_s = TrainingReport(), 0.0
    guests.stand_by()
    while not wait.all_finished():
        with while_training():
            report += train_safely(
                trainer, policy, stop=lambda: wait.all_finished() or guests.has_work(), max_step_s=MAX_STEP_S
            )
        while not (wait.all_finished() or guests.has_work()):
            guests.rest()  # there is nothing left to train on
        if guests.has_work():
            began_s = time.perf_counter()
            guests.serve()
            served_s += time.perf_counter() - began_s
    return report, served_s


def serve_until_all_finished(wait: StragglerWait, guests: Guests) -> None:
    """
    Runs samples of other ranks until the last rank has finished its rollout, in a run that trains nothing at present.

    Raises:
        [`StragglerError`]: If a rank did not finish within the deadline.
    """
    guests.stand_by()
    while not wait.all_finished():
        if guests.has_work():
            guests.serve()
        else:
            guests.rest()
    wait.join()


def with_idle_time(report: TrainingReport, idle_s: float, stop_latency_s: float) -> TrainingReport:
    """The report of a period of training that filled a wait."""
    # A last step that was not abandoned began inside the wait and may have ended after it.
    overrun_s = 0.0 if report.interrupted else stop_latency_s
    used_s = min(max(0.0, report.step_time_s - overrun_s), idle_s)
    return replace(report, idle_s=idle_s, idle_used_s=used_s, stop_latency_s=stop_latency_s)


class BackgroundTraining:
    """
    Trains the drafter in a thread while the process waits for something that needs no accelerator: reward functions,
    tools, environments.

    The thread has its own gradient mode and autocast state, draws from the drafter's own generator and touches nothing
    of the policy, so code that runs at the same time gives the same results. It still takes time from that code: the
    two share the interpreter lock and, on CPU, the cores.

    Args:
        train (`Callable[[Callable[[], bool]], TrainingReport]`):
            Trains until its argument returns `True`. Not called when there is less to wait for than 50 ms.
        report (`Callable[[TrainingReport], None]`):
            Takes the report of every period, with the time waited, used and outlived.
    """

    def __init__(
        self, train: Callable[[Callable[[], bool]], TrainingReport], report: Callable[[TrainingReport], None]
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
        self._result: TrainingReport | None = None
        self._started_s = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="tlt-trl drafter training", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        is_over = self._stop_signal.wait(PATIENCE_S)
        self._result = TrainingReport() if is_over else self._train(self._stop_signal.is_set)

    def _stop(self) -> None:
        stopped = time.perf_counter()
        self._stop_signal.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        idle_s, latency_s = stopped - self._started_s, time.perf_counter() - stopped
        # No result: the thread has died, with a traceback. Raising here would hide an error of what ran meanwhile.
        result = TrainingReport(failures=1) if self._result is None else self._result
        self._report(with_idle_time(result, idle_s, latency_s))
