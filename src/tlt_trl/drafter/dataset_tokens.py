"""Counting the tokens of a training set, from which a reduced draft vocabulary is chosen."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor


MAX_ROWS = 4096  # more rows do not change which tokens are the most frequent few thousand


def count_tokens(rows: Iterable[dict[str, Any]], tokenizer, vocab_size: int) -> Tensor:
    """
    How often each token occurs in the text of the first rows of a dataset.

    All text columns are counted, since answers matter more to a drafter than prompts: a column of solutions, where
    there is one, is what the rollouts will look like.

    Args:
        rows (`Iterable[dict[str, Any]]`):
            Rows of the training set; texts, conversations and lists of either are read, all else is ignored.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.
        vocab_size (`int`):
            Size of the policy's vocabulary.

    Returns:
        `torch.LongTensor` of shape (vocab_size,).
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in islice(iter(rows), MAX_ROWS):
        for text in _texts(row):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            counts += torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=vocab_size)
    return counts


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
