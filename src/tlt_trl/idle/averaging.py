"""Merging drafters that ranks have trained apart, each in its own waiting time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


# Sums a tensor over all ranks, in place.
AllReduce = Callable[[Tensor], None]


@torch.no_grad()
def average_by_tokens(tensors: Sequence[Tensor], tokens: float, all_reduce: AllReduce) -> float:
    """
    Replaces tensors by their average over ranks, weighted by the tokens that each rank has trained.

    All ranks hold the same tensors when a period of training begins, so the weighted average of the tensors is the
    common start plus the weighted average of what each rank changed. A rank that trained nothing counts nothing; when
    no rank did, nothing is sent but one number. The moments of the optimiser are averaged like the weights: a rank
    that trained little would else go on with moments of weights that are not its own any more.

    Args:
        tensors (`Sequence[Tensor]`):
            Floating-point tensors, changed in place; the same shapes in the same order on every rank.
        tokens (`float`):
            Tokens that this rank has trained since the last merge.
        all_reduce (`AllReduce`):
            Sums a tensor over all ranks in place, such as `torch.distributed.all_reduce`.

    Returns:
        `float`: Tokens trained by all ranks.
    """
    total = torch.tensor([tokens], dtype=torch.float64, device=tensors[0].device)
    all_reduce(total)
    if not total.item():
        return 0.0
    # One collective for everything: a drafter has a few dozen tensors, most of them small.
    flat = torch.cat([tensor.detach().float().flatten() for tensor in tensors]) * (tokens / total.item())
    all_reduce(flat)
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
    return total.item()
