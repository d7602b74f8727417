"""
Pack samples into one row without padding, and say which positions are trained on.

TLT's public code packs with a mask of ones, so samples attend to each other, and labels cross the seams between them.
Here every position has a document id, attention stays inside the document, and no label crosses its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .feature_buffer import FeatureSample


@dataclass
class Document:
    """
    One sample inside a packed row.

    Positions `first_row … end` of the row can be drafted from: `first_row` predicts the first answer token. Row t
    predicts token t + 2 + j in draft step j, so each step loses one row at the end.
    """

    start: int
    end: int
    first_row: int

    def num_rows(self, step: int) -> int:
        return max(0, self.end - 2 - step - self.first_row)


@dataclass
class PackedBatch:
    """
    Args:
        input_ids (`torch.Tensor` of shape (N,)):
            Tokens of all documents, one after the other.
        aux_hidden_states (`torch.Tensor` of shape (N, num_aux * H)):
            Policy states at those tokens.
        last_hidden_state (`torch.Tensor` of shape (N, H)):
            Input of the policy's `lm_head` at those tokens: the teacher.
        document_ids (`torch.Tensor` of shape (N,)):
            Which document a position belongs to.
        position_ids (`torch.Tensor` of shape (N,)):
            Position inside the document, as the engine counts it.
        documents (`list[Document]`):
            The documents.
    """

    input_ids: Tensor
    aux_hidden_states: Tensor
    last_hidden_state: Tensor
    document_ids: Tensor
    position_ids: Tensor
    documents: list[Document]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    def rows(self, step: int) -> Tensor:
        """Positions trained on in draft step `step`: the loss mask as indices, document by document."""
        device = self.input_ids.device
        spans = [torch.arange(d.first_row, d.first_row + d.num_rows(step), device=device) for d in self.documents]
        return torch.cat(spans)

    def loss_mask(self, step: int) -> Tensor:
        """The same as a boolean mask of shape (N,)."""
        mask = torch.zeros(self.num_tokens, dtype=torch.bool, device=self.input_ids.device)
        mask[self.rows(step)] = True
        return mask

    def to(self, device: torch.device | str) -> "PackedBatch":
        tensors = {
            name: tensor.to(device, non_blocking=True)
            for name, tensor in vars(self).items()
            if isinstance(tensor, Tensor)
        }
        return PackedBatch(**tensors, documents=self.documents)


def pack(samples: Sequence[FeatureSample]) -> PackedBatch:
    """
    Pack samples into one row.

    ```text
    tokens        p p a a a | p a a a
    document_ids  0 0 0 0 0 | 1 1 1 1
    position_ids  0 1 2 3 4 | 0 1 2 3
    rows(0)       x x x     | x x          row t predicts token t + 2, answers only
    rows(1)       x x       | x            row t predicts token t + 3
    ```
    """
    documents, start = [], 0
    for sample in samples:
        end = start + sample.num_tokens
        documents.append(Document(start, end, first_row=start + max(0, sample.prompt_length - 2)))
        start = end
    lengths = torch.tensor([sample.num_tokens for sample in samples])
    return PackedBatch(
        input_ids=torch.cat([sample.input_ids for sample in samples]),
        aux_hidden_states=torch.cat([sample.aux_hidden_states for sample in samples]),
        last_hidden_state=torch.cat([sample.last_hidden_state for sample in samples]),
        document_ids=torch.repeat_interleave(torch.arange(len(samples)), lengths),
        position_ids=torch.cat([torch.arange(sample.num_tokens) for sample in samples]),
        documents=documents,
    )


def crop(sample: FeatureSample, max_tokens: int, generator: torch.Generator) -> FeatureSample:
    """
    A window of a sample that is too long for a batch, with at least one answer token to predict.

    The policy's states still depend on the tokens that are cut off; only the drafter's own attention starts later.
    """
    if sample.num_tokens <= max_tokens:
        return sample
    latest = sample.num_tokens - max_tokens
    earliest = min(max(0, sample.prompt_length + 1 - max_tokens), latest)
    start = int(torch.randint(earliest, latest + 1, (), generator=generator))
    return FeatureSample(
        input_ids=sample.input_ids[start : start + max_tokens],
        aux_hidden_states=sample.aux_hidden_states[start : start + max_tokens],
        last_hidden_state=sample.last_hidden_state[start : start + max_tokens],
        prompt_length=max(0, sample.prompt_length - start),
        step=sample.step,
    )
