"""Has the policy changed since its weights were last pushed? Asked before every rollout, so it must be cheap."""

from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from ..upstream import version_of


# Numbers of each parameter that go into a mark; an optimiser step or a loaded checkpoint changes nearly all of them.
SAMPLED_NUMBERS = 32


@dataclass(frozen=True)
class PolicyMark:
    """
    State of a policy on this rank, for comparisons.

    No part is enough: torch's version counters miss what is written through `.data`, a sample misses what is changed
    elsewhere, and neither sees that another adapter is used. 5 ms for the 272 parameters of a 135M policy on one core.

    Attributes:
        versions (`tuple[int, ...]`):
            Version counter of every parameter.
        sample (`bytes`):
            A few numbers of every parameter.
        adapters (`tuple`):
            Of every PEFT layer, the active adapters and whether they are disabled.
    """

    versions: tuple[int, ...]
    sample: bytes
    adapters: tuple[tuple[tuple[str, ...], bool], ...]

    @classmethod
    @torch.no_grad()
    def of(cls, policy: torch.nn.Module) -> "PolicyMark":
        """Marks a policy as it is now; of a sharded one, what this rank holds."""
        tensors = [_local(parameter) for parameter in policy.parameters()]
        sampled = [_sampled(tensor) for tensor in tensors if tensor.numel()]
        sample = torch.cat(sampled).cpu().numpy().tobytes() if sampled else b""
        layers = [layer for layer in policy.modules() if isinstance(layer, BaseTunerLayer)]
        adapters = tuple((tuple(layer.active_adapters), layer.disable_adapters) for layer in layers)
        return cls(tuple(version_of(tensor) for tensor in tensors), sample, adapters)

    @property
    def has_disabled_adapters(self) -> bool:
        """Whether the policy is its base model at the moment."""
        return any(is_disabled for _, is_disabled in self.adapters)


def _local(parameter: torch.nn.Parameter) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return parameter.to_local()
    # DeepSpeed leaves an empty parameter in place of one that is in pieces.
    return parameter.ds_tensor if is_deepspeed_zero3_enabled() else parameter.detach()


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.flatten()
    return flat[:: max(1, len(flat) // SAMPLED_NUMBERS)][:SAMPLED_NUMBERS].float()
