"""What a trainer asks where no drafter is trained."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor


class InactiveOnlineDrafter:
    """Stands in for an [`OnlineDrafter`] where nothing is trained, with a drafter or without."""

    steps = 0

    def __init__(self) -> None:
        self.tokens_trained = 0

    def start_run(self) -> None:
        """Nothing to begin."""

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_rollout(self, step: int) -> None:
        """Nothing to age."""

    def train_after_rollout(self) -> None:
        """Nothing to train."""

    def note_rollout(self, metrics: Mapping[str, float]) -> None:
        """Nothing that has to pay for itself."""

    def in_background(self) -> AbstractContextManager[None]:
        return nullcontext()

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def start_scoring(self, is_training: bool) -> None:
        """Nothing to record."""

    def recording(
        self, input_ids: Tensor, attention_mask: Tensor, prompt_length: int, step: int, micro_step: int
    ) -> AbstractContextManager[None]:
        return nullcontext()

    def pop_metrics(self) -> dict[str, float]:
        return {}

    def describe(self) -> str:
        return ""

    def state_dict(self) -> dict[str, Any]:
        return {"tokens_trained": self.tokens_trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """All but the number of tokens means nothing here: what a run has trained is in the weights."""
        self.tokens_trained = state["tokens_trained"]
