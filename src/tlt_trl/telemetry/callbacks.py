"""Callbacks that note what transformers does outside the trainer's own methods."""

from transformers import TrainerCallback

from .timeline import POLICY_TRAINING, Timeline


class OptimizerStepInterval(TrainerCallback):
    """The policy's optimiser step, which is outside `training_step`, is policy training too."""

    def __init__(self, timeline: Timeline):
        self.timeline = timeline

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._interval = self.timeline.interval(POLICY_TRAINING)
        self._interval.__enter__()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._interval.__exit__(None, None, None)
