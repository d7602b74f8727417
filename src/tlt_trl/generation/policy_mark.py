"""Has the policy changed since its weights were last pushed? Asked before every rollout, so it must be cheap."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..upstream import version_of


# Numbers of each parameter that go into a mark; an optimiser step or a loaded checkpoint changes nearly all of them.
SAMPLED_NUMBERS = 32


@dataclass(frozen=True)
class PolicyMark:
    """
    State of the policy's parameters on this rank, for comparisons.

    Neither part is enough: torch's version counters miss what is written through `.data`, and a sample misses what is
    changed elsewhere. 5 ms for the 272 parameters of a 135M policy on one core.

    Attributes:
        versions (`tuple[int, ...]`):
            Version counter of every parameter.
        sample (`bytes`):
            A few numbers of every parameter.
    """

    versions: tuple[int, ...]
    sample: bytes

    @classmethod
    @torch.no_grad()
    def of(cls, parameters: Iterable[torch.nn.Parameter]) -> "PolicyMark":
        """Marks parameters as they are now; of sharded ones, what this rank holds."""
        tensors = [_local(parameter) for parameter in parameters]
        sampled = [_sampled(tensor) for tensor in tensors if tensor.numel()]
        sample = torch.cat(sampled).cpu().numpy().tobytes() if sampled else b""
        return cls(tuple(version_of(tensor) for tensor in tensors), sample)


def _local(parameter: torch.nn.Parameter) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    # DeepSpeed leaves an empty parameter in place of one that is in pieces.
    return parameter.ds_tensor if is_deepspeed_zero3_enabled() else parameter.detach()


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // SAMPLED_NUMBERS)][:SAMPLED_NUMBERS].float()
