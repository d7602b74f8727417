"""The reduced draft vocabulary: a head over the few thousand tokens that a task uses is several times cheaper."""

from collections.abc import Sequence

import torch
from torch import Tensor


# Above it, a smaller draft vocabulary is the default.
FULL_UP_TO = 8192


def default_draft_vocab_size(vocab_size: int) -> int:
    """
    A quarter of the policy's vocabulary, as published EAGLE-3 heads have, in multiples of 64; small ones whole.

    Training on 49 152 tokens instead of 2 048 took four times as long per step, on one core.
    """
    return min(vocab_size, max(FULL_UP_TO, vocab_size // 4 // 64 * 64))


def most_frequent_token_ids(token_counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """
    The `size` most frequent tokens, for [`Drafter.from_policy`].

    Args:
        token_counts (`torch.Tensor` of shape (vocab_size,)):
            How often each token occurs in the training prompts and answers.
        size (`int`):
            Number of tokens to keep. Engines run best with a multiple of 64.
        always (`Sequence[int]`, *optional*, defaults to `()`):
            Tokens to keep regardless of their count, for example the end-of-sequence tokens.

    Returns:
        `torch.LongTensor` of shape (size,): sorted token ids. Of equal counts, the smaller id is kept.
    """
    vocab_size = token_counts.shape[0]
    kept = sorted(set(always))
    if not max(1, len(kept)) <= size <= vocab_size:
        raise ValueError(
            f"size={size} of the draft vocabulary must be between {max(1, len(kept))} (tokens always kept) and the "
            f"vocabulary size {vocab_size}."
        )
    if kept and not 0 <= kept[0] <= kept[-1] < vocab_size:
        raise ValueError(f"always={kept} holds ids outside the vocabulary of {vocab_size} tokens.")
    priority = token_counts.to("cpu", torch.float64, copy=True)
    priority[kept] = float("inf")
    order = torch.sort(priority, descending=True, stable=True).indices
    return order[:size].sort().values
