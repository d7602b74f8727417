"""What a preemptible training needs beside the training: a state to go back to, and how long a step takes."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


# Below this a batch holds too little of an answer to learn its later draft steps from.
MIN_TOKENS_PER_STEP = 64


class GoodState:
    """
    A copy of the last good weights and AdamW state.

    Args:
        parameters (`Iterable[torch.nn.Parameter]`):
            What is trained.
        optimizer (`torch.optim.AdamW`):
            Whose state is kept.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.AdamW):
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._kept: list[Tensor] = []
        self._counters: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self._kept

    @torch.no_grad()
    def keep(self, *counters: int) -> None:
        """Copies weights and state, and keeps two counters with them; nothing if the weights are broken."""
        if not self.weights_are_finite():
            return
        tensors = self._tensors()
        if self._kept:
            for kept, tensor in zip(self._kept, tensors, strict=True):
                kept.copy_(tensor)
        else:
            self._kept = [tensor.clone() for tensor in tensors]
        self._counters = counters

    @torch.no_grad()
    def restore(self) -> tuple[int, ...] | None:
        """Writes the copy back and returns its counters; `None` when there is none."""
        if not self._kept:
            return None
        for kept, tensor in zip(self._kept, self._tensors(), strict=True):
            tensor.copy_(kept)
        return self._counters

    def discard(self) -> None:
        """Gives the memory of the copy back."""
        self._kept = []

    def weights_are_finite(self) -> bool:
        return all(bool(torch.isfinite(parameter).all()) for parameter in self._parameters)

    def _tensors(self) -> list[Tensor]:
        """Weights and optimiser state; what AdamW makes at its first step is made here if that is still to come."""
        state = self._optimizer.state
        for parameter in self._parameters:
            if not state[parameter]:
                state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        moments = [state[p][name] for p in self._parameters for name in ("step", "exp_avg", "exp_avg_sq")]
        return [*self._parameters, *moments]


class StepTimes:
    """Running estimates of the seconds of an optimiser step and of a token in it."""

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._token_s: float | None = None

    @property
    def step_s(self) -> float:
        """0.0 before the first step."""
        return self._step_s or 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """Takes note of a step; of one that was dropped, with 0 tokens, only its time."""
        self._step_s = _smoothed(self._step_s, seconds)
        if tokens:
            self._token_s = _smoothed(self._token_s, seconds / tokens)

    def tokens_for(self, max_step_s: float) -> int | None:
        """Tokens that one step can take in that time; a first step has no estimate and is the smallest there is."""
        if max_step_s == float("inf"):
            return None
        if self._token_s is None:
            return MIN_TOKENS_PER_STEP
        return max(MIN_TOKENS_PER_STEP, int(max_step_s / self._token_s))

    def state_dict(self) -> dict[str, float | None]:
        return {"step_s": self._step_s, "token_s": self._token_s}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        self._step_s, self._token_s = state["step_s"], state["token_s"]


def _smoothed(estimate: float | None, value: float) -> float:
    return value if estimate is None else 0.7 * estimate + 0.3 * value
