"""
Which CUDA graphs an engine with adaptive draft lengths needs (the graph pool of TLT, arXiv 2511.16665).

vLLM captures one graph per number of tokens in a step and pads a step to the next larger size. A request with `k`
draft tokens takes `k + 1` tokens, so every strategy needs its own sizes, and capturing them separately takes several
times the memory. Here, sizes that lie close together are shared by several strategies. One list serves both the
policy, which verifies `batch * (k + 1)` tokens, and the drafter, which drafts `batch` tokens at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass


# vLLM's own limit. A step with more tokens is compute-bound, so a graph would not make it faster.
MAX_CAPTURED_TOKENS = 512


@dataclass(frozen=True)
class CudaGraphPlan:
    """
    Attributes:
        sizes (`tuple[int, ...]`):
            Tokens per step to capture, ascending.
        token_slots (`int`):
            Sum of `sizes`; the memory of the graphs is proportional to it.
        separate_token_slots (`int`):
            The same, if every strategy were captured separately at every batch size.
    """

    sizes: tuple[int, ...]
    token_slots: int
    separate_token_slots: int

    def max_bytes(self, num_layers: int, hidden_size: int, bytes_per_value: int) -> int:
        """Upper bound of the graphs' memory: six activations as wide as the model for each layer and token slot."""
        return self.token_slots * num_layers * 6 * hidden_size * bytes_per_value

    def describe(self, num_layers: int, hidden_size: int, bytes_per_value: int) -> str:
        """One line for the log."""
        mebibytes = self.max_bytes(num_layers, hidden_size, bytes_per_value) / 2**20
        return (
            f"CUDA graphs of {len(self.sizes)} sizes up to {self.sizes[-1]} tokens, at most {mebibytes:.0f} MiB by "
            f"estimate; captured apart for every strategy they would take "
            f"{self.separate_token_slots / self.token_slots:.1f} times as much."
        )


def batch_sizes(max_batch_size: int) -> list[int]:
    """Batch sizes worth a size of their own: every one up to 8, then 8 for every doubling, and the largest."""
    sizes, step = list(range(1, min(8, max_batch_size) + 1)), 1
    while sizes[-1] < max_batch_size:
        if sizes[-1] >= 16 * step:
            step *= 2
        sizes.append(min(sizes[-1] + step, max_batch_size))
    return sizes


def plan_cuda_graphs(
    draft_lengths: Sequence[int],
    max_batch_size: int,
    max_tokens: int = MAX_CAPTURED_TOKENS,
    max_padding: float = 0.125,
) -> CudaGraphPlan:
    """
    Plans the sizes to capture.

    Args:
        draft_lengths (`Sequence[int]`):
            Draft tokens of the strategies; 0 is always planned for.
        max_batch_size (`int`):
            Largest number of running requests.
        max_tokens (`int`, *optional*, defaults to `512`):
            Largest size to capture.
        max_padding (`float`, *optional*, defaults to `0.125`):
            Share of a captured step that may be padding where strategies share sizes. More merges more sizes.
    """
    if not 0.0 <= max_padding < 1.0:
        raise ValueError(f"max_padding={max_padding} must be at least 0 and less than 1.")
    lengths = sorted({1, *(choice + 1 for choice in draft_lengths)})
    wanted = [b * length for length in lengths for b in batch_sizes(max_batch_size) if b * length <= max_tokens]
    # From the largest down: a size is left out when the next larger one kept is near enough.
    kept: list[int] = []
    for size in sorted(set(wanted), reverse=True):
        if not kept or size < (1.0 - max_padding) * kept[-1]:
            kept.append(size)
    return CudaGraphPlan(tuple(reversed(kept)), sum(kept), sum(wanted))
