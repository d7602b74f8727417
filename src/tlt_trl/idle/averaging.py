"""Merging drafters that ranks have trained apart, each in its own waiting time."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


# Sums a tensor over all ranks, in place.
AllReduce = Callable[[Tensor], None]

# Elements sent in one collective (256 MB in fp32): a second copy of a large drafter might not fit beside the engine.
BUCKET_ELEMENTS = 1 << 26


@torch.no_grad()
def average_by_tokens(tensors: Sequence[Tensor], tokens: float, all_reduce: AllReduce) -> float:
    """
    Replaces tensors by their average over ranks, weighted by the tokens that each rank has trained.

    All ranks hold the same tensors when a period of training begins, so the weighted average of the tensors is the
    common start plus the weighted average of what each rank changed. A rank that trained nothing counts nothing; when
    no rank did, nothing is sent but one number.

    Only weights are merged, as in local SGD. The moments of AdamW stay with their rank: at the betas of
    [`DrafterTrainer`] they forget within ten to twenty steps, less than one wait, while merging them would treble what
    is sent.

    Args:
        tensors (`Sequence[Tensor]`):
            Contiguous floating-point tensors, changed in place; the same shapes in the same order on every rank.
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
    for bucket in _buckets(tensors):
        flat = torch.cat([part.float() for part in bucket])
        # In place: on CPU a second buffer of this size costs more than the product itself.
        flat *= tokens / total.item()
        all_reduce(flat)
        for part, averaged in zip(bucket, flat.split([len(part) for part in bucket]), strict=True):
            part.copy_(averaged)
    return total.item()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """
    Flat views of the tensors, or of parts of large ones, grouped for one collective each: a drafter has a few dozen
    tensors, most of them small.
    """
    bucket: list[Tensor] = []
    room = BUCKET_ELEMENTS
    for tensor in tensors:
        for part in tensor.detach().view(-1).split(BUCKET_ELEMENTS):
            if len(part) > room:
                yield bucket
                bucket, room = [], BUCKET_ELEMENTS
            bucket.append(part)
            room -= len(part)
    yield bucket
