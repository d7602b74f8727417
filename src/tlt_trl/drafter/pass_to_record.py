"""Which of the policy's forward passes the features are taken from."""

import torch


class PassToRecord:
    """
    Which of the policy's forward passes the features are taken from.

    TRL scores a generation without gradients where it needs the log-probs of the policy that sampled it (its
    condition, word for word). That pass is the first one after a generation; the reference pass, which for PEFT runs
    on the same module with its adapters disabled, is the second and must not be recorded. Where nothing is scored the
    features come from the loss, in the first of `num_iterations` passes over a generation only.

    Args:
        steps_per_generation, num_iterations, gradient_accumulation_steps (`int`):
            Of the run.
        corrects_importance (`bool`):
            Whether TRL corrects for the difference between the engine's log-probs and the policy's.
    """

    def __init__(
        self,
        steps_per_generation: int,
        num_iterations: int,
        gradient_accumulation_steps: int,
        corrects_importance: bool,
    ):
        self._first_pass = steps_per_generation
        self._generate_every = steps_per_generation * num_iterations  # micro-steps that one generation serves
        self._is_scored = gradient_accumulation_steps % self._generate_every != 0 or corrects_importance
        self._awaits_scoring = False

    def start_generation(self, is_training: bool) -> None:
        """A generation begins; that of an evaluation is not recorded."""
        self._awaits_scoring = is_training and self._is_scored

    def take(self, micro_step: int) -> bool:
        """Whether the pass that comes now, in that call of `training_step`, is the one; asked once for each."""
        if not self._is_scored:
            return torch.is_grad_enabled() and micro_step % self._generate_every < self._first_pass
        is_taken = self._awaits_scoring and not torch.is_grad_enabled()
        self._awaits_scoring = self._awaits_scoring and not is_taken
        return is_taken
