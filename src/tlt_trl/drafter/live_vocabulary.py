"""A draft vocabulary that follows the answers of the run, since a training set often holds prompts only."""

from collections.abc import Callable

import torch
from torch import Tensor

from .feature_buffer import FeatureBuffer
from .modeling_drafter import Drafter
from .vocabulary import most_frequent_token_ids


class LiveVocabulary:
    """
    Chooses the draft vocabulary anew from the tokens that the run has produced, after 1, 2, 4, 8, … rollouts.

    Possible for a drafter with the policy's head, whose rows may change at any time. Tokens that have not been seen
    keep their place before others that have not. A drafter of the whole vocabulary or with a head of its own stays as
    it is.

    Args:
        drafter ([`Drafter`]):
            Whose vocabulary it is.
        buffer ([`FeatureBuffer`]):
            Holds the samples of the last rollouts.
        sum_over_ranks (`Callable[[torch.Tensor], torch.Tensor]`):
            Adds a tensor up over all ranks, which then choose the same vocabulary.
    """

    def __init__(self, drafter: Drafter, buffer: FeatureBuffer, sum_over_ranks: Callable[[Tensor], Tensor]):
        self._drafter = drafter
        self._buffer = buffer
        self._sum_over_ranks = sum_over_ranks
        self._counts = torch.zeros(drafter.config.vocab_size, dtype=torch.long)
        self._num_rollouts = 0

    def follow(self) -> bool:
        """
        Called before every rollout, on all ranks.

        Returns:
            `bool`: Whether the vocabulary has changed.
        """
        drafter, rollouts = self._drafter, self._num_rollouts
        self._num_rollouts += 1
        is_due = rollouts > 0 and rollouts & (rollouts - 1) == 0
        if not is_due or drafter.has_full_vocabulary or drafter.config.head == "own":
            return False
        counts = torch.zeros_like(self._counts)
        for sample in self._buffer.samples:
            counts += torch.bincount(sample.input_ids.cpu(), minlength=len(counts))
        self._counts += self._sum_over_ranks(counts.to(drafter.device)).cpu()
        priority = self._counts + 0.5 * drafter.t2d.cpu()
        ids = most_frequent_token_ids(priority, drafter.config.draft_vocab_size)
        if torch.equal(ids, drafter.draft_token_ids.cpu()):
            return False
        drafter.choose_vocabulary(ids)
        return True
