"""Several ranks hold one drafter: they begin with that of the first one, and compare checksums."""

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor

from .configuration_drafter import DrafterConfig
from .modeling_drafter import Drafter


logger = logging.getLogger(__name__)

# Concatenates the tensors of all ranks along the first dimension, in their order.
Gather = Callable[[Tensor], Tensor]

COMPARED = ("weights", "draft vocabulary", "feature layers")


class DraftersDifferError(RuntimeError):
    """Ranks hold different drafters."""


@torch.no_grad()
def drafter_of_first_rank(drafter: Drafter) -> Drafter:
    """
    The drafter of the first rank; every rank must call it with its own, on the device that collectives work on.

    Ranks may have made theirs from different things: a policy that FSDP fills with zeros on every rank but one until
    it is prepared (`fsdp_cpu_ram_efficient_loading`), or a data set of which each rank has a part.

    Args:
        drafter ([`Drafter`]):
            In fp32, overwritten.

    Returns:
        [`Drafter`]: `drafter`, or another one where its configuration is not that of the first rank.
    """
    configs = [_comparable(drafter)]
    broadcast_object_list(configs)
    if _comparable(drafter) != configs[0]:
        logger.warning("This rank's drafter has another configuration than that of rank 0, which takes its place.")
        device = drafter.d2t.device
        # The constructors of nn.Linear draw random numbers, which ranks that share an engine must have in common.
        with torch.random.fork_rng(devices=[]):
            drafter = Drafter(DrafterConfig.from_dict(configs[0])).to(device, torch.float32)
    for tensor in drafter.state_dict().values():
        torch.distributed.broadcast(tensor, src=0)
    return drafter


def _comparable(drafter: Drafter) -> dict[str, Any]:
    """The configuration without the folder that it was loaded from, which each machine may have elsewhere."""
    return {name: value for name, value in drafter.config.to_dict().items() if name != "_name_or_path"}


@torch.no_grad()
def check_identical(drafter: Drafter, gather: Gather) -> None:
    """
    Compares checksums over all ranks: one pass over the weights and a few bytes sent.

    Args:
        drafter ([`Drafter`]):
            In fp32.
        gather (`Gather`):
            Such as `accelerator.gather`.

    Raises:
        [`DraftersDifferError`]: If weights, vocabulary or feature layers of a rank are not those of the first.
    """
    sums = [weight.view(torch.int32).sum(dtype=torch.int64) for weight in drafter.trained_parameters()]
    weights = torch.stack(sums).sum()
    # Hashed, not summed: vocabularies of one size often have the same sum.
    vocabulary = _hash(drafter.d2t.cpu().numpy().tobytes() + drafter.t2d.cpu().numpy().tobytes())
    layers = _hash(json.dumps(drafter.config.eagle_aux_hidden_state_layer_ids).encode())
    own = torch.tensor([[0, vocabulary, layers]], device=weights.device)
    own[0, 0] = weights
    all_ranks = gather(own)
    is_other = (all_ranks != all_ranks[0]).cpu()
    if not is_other.any():
        return
    ranks = is_other.any(1).nonzero().flatten().tolist()
    names = [name for name, differs in zip(COMPARED, is_other.any(0).tolist(), strict=True) if differs]
    raise DraftersDifferError(
        f"The drafters of ranks {ranks} are not that of rank 0: their {', '.join(names)} differ. Their engines would "
        "draft differently and their average would be of no use. All ranks begin with the drafter of rank 0 and merge "
        "theirs after every period of training. Does your code change `trainer.drafter` on some ranks only? Do all "
        "ranks run the same versions of torch and of the collective library, on the same kind of device? "
        "`drafter_training=False` goes on with the present drafter."
    )


def _hash(data: bytes) -> int:
    """64 bits, signed."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), signed=True)
