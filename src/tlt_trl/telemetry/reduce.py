"""Adding up what every rank has counted."""

from collections.abc import Mapping
from typing import Any

import torch


def sum_over_ranks(
    accelerator: Any, sums: Mapping[str, float], maxima: Mapping[str, float] | None = None
) -> dict[str, float]:
    """
    Adds numbers up over all ranks, in one collective that every rank must call.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Of the run.
        sums (`Mapping[str, float]`):
            Numbers to add; the same names in the same order on every rank.
        maxima (`Mapping[str, float]`, *optional*):
            Numbers of which the largest counts.

    Returns:
        `dict[str, float]`: All of them by name.
    """
    maxima = {} if maxima is None else maxima
    # fp32: an accelerator may have no fp64.
    own = torch.tensor([[*sums.values(), *maxima.values()]], dtype=torch.float32, device=accelerator.device)
    columns = list(zip(*accelerator.gather(own).tolist(), strict=True))
    total = {name: sum(column) for name, column in zip(sums, columns[: len(sums)], strict=True)}
    return total | {name: max(column) for name, column in zip(maxima, columns[len(sums) :], strict=True)}
