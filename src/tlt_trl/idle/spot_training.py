"""Training the drafter in the time that a rank waits for the others (the Spot Trainer of TLT, arXiv 2511.16665)."""

import time

from ..drafter.drafter_trainer import DrafterTrainer
from .straggler_wait import StragglerWait


# The last rank must not be kept waiting for longer than that; the estimate behind it is off by some ten percent.
MAX_STEP_S = 0.08


def train_until_all_finished(trainer: DrafterTrainer, wait: StragglerWait) -> dict[str, float]:
    """
    Trains the drafter one optimiser step at a time until the last rank has finished its rollout.

    It holds no collective, so a rank that trains delays nobody by more than the step it is in. A buffer with nothing
    to learn from leaves a plain wait.

    Args:
        trainer ([`DrafterTrainer`]):
            Trainer of this rank's drafter.
        wait ([`StragglerWait`]):
            Announced for this rollout.

    Returns:
        `dict[str, float]`: What [`DrafterTrainer.train_for`] reports, and `idle_s` (time until the last rank was
        done), `idle_used_fraction` (share of it spent in optimiser steps) and `stop_latency_s` (time by which the last
        step outlived the wait).
    """
    started = time.perf_counter()
    report = trainer.train_for(float("inf"), stop=wait.all_finished, max_step_s=MAX_STEP_S)
    trained = time.perf_counter()
    wait.join()
    report["idle_s"] = max(0.0, wait.finished_at_s - started)
    report["stop_latency_s"] = max(0.0, trained - max(started, wait.finished_at_s))
    used = min(report["seconds"], report["idle_s"])
    report["idle_used_fraction"] = used / report["idle_s"] if report["idle_s"] > 0 else 0.0
    return report
