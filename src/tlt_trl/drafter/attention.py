"""
Attention of the unrolled drafter (training-time test of EAGLE-3, arXiv 2503.01840).

In draft step j, the query of row t sees the step-0 keys of its document up to t, and the keys of steps 1 … j of its
own row only. This is exactly the key/value cache of the engine after j draft tokens.

```text
step 1, document of 4 tokens      step-0 keys   step-1 keys
                          row 0   x . . .       x . . .
                          row 1   x x . .       . x . .
                          row 2   x x x .       . . x .
```

The step-0 part is flash attention per document, the own-row part is a dot product. They are merged through their
log-sum-exp, so no (N, N) mask or score matrix exists. The backward pass is exact, by the trick of ring attention:
given the *merged* output and log-sum-exp, the gradients of each part are those of the whole softmax.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .packing import PackedBatch


# Queries per chunk where no flash kernel is used. The score matrix is at most this times the document's length.
QUERY_CHUNK = 1024


@dataclass
class Block:
    """`queries` (rows of this step) attend to `keys` (of all tokens), with a causal mask or without any mask."""

    queries: slice
    keys: slice
    is_causal: bool


def step_blocks(batch: PackedBatch, step: int) -> list[Block]:
    """Two blocks per document: the keys before its first trained row, and the triangle from there on."""
    blocks, first_query = [], 0
    for document in batch.documents:
        num_rows = document.num_rows(step)
        queries = slice(first_query, first_query + num_rows)
        first_query += num_rows
        if num_rows == 0:
            continue
        if document.first_row > document.start:
            blocks.append(Block(queries, slice(document.start, document.first_row), is_causal=False))
        blocks.append(Block(queries, slice(document.first_row, document.first_row + num_rows), is_causal=True))
    return blocks


def unrolled_attention(
    query: Tensor, key: Tensor, value: Tensor, own_keys: Tensor, own_values: Tensor, blocks: list[Block], scale: float
) -> Tensor:
    """
    Args:
        query (`torch.Tensor` of shape (heads, M, head_dim)):
            Queries of the M rows trained in this step.
        key, value (`torch.Tensor` of shape (heads, N, head_dim)):
            Step-0 keys and values of all tokens, repeated to the number of query heads.
        own_keys, own_values (`torch.Tensor` of shape (step, heads, M, head_dim)):
            Keys and values of steps 1 … `step` of the same rows.
        blocks (`list[Block]`):
            See [`step_blocks`].
        scale (`float`):
            Factor on the scores.

    Returns:
        `torch.Tensor` of shape (heads, M, head_dim).
    """
    dtype, tensors = query.dtype, (query, key, value, own_keys, own_values)
    if query.device.type == "cpu":
        # On CPU, the backward pass of flash attention is slower in bf16 than in fp32: 3 times for documents of 100
        # tokens, 6 times for 40. Below 600 tokens it is never faster.
        tensors = tuple(tensor.float() for tensor in tensors)
    return _UnrolledAttention.apply(*tensors, blocks, scale).to(dtype)


def reference_unrolled_attention(
    query: Tensor, key: Tensor, value: Tensor, own_keys: Tensor, own_values: Tensor, batch: PackedBatch, scale: float
) -> Tensor:
    """The same with a dense mask, for tests."""
    step = own_keys.shape[0]
    rows = batch.rows(step)
    same_document = batch.document_ids[rows, None] == batch.document_ids[None, :]
    not_later = batch.position_ids[None, :] <= batch.position_ids[rows, None]
    scores = query @ key.transpose(1, 2) * scale  # shape: [heads, M, N]
    scores = scores.masked_fill(~(same_document & not_later), float("-inf"))
    own_scores = (query * own_keys).sum(-1) * scale  # shape: [step, heads, M]
    probs = torch.cat([scores, own_scores.movedim(0, -1)], dim=-1).softmax(dim=-1)
    first, own = probs.split([key.shape[1], step], dim=-1)
    return first @ value + (own.movedim(-1, 0).unsqueeze(-1) * own_values).sum(0)


class _UnrolledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, own_keys, own_values, blocks, scale):
        out = query.new_zeros(query.shape, dtype=torch.float32)
        # own_scores shape: [step, heads, M]
        own_scores = (query * own_keys).sum(-1, dtype=torch.float32) * scale
        lse = torch.full(query.shape[:2], float("-inf"), device=query.device)  # shape: [heads, M]
        if own_keys.shape[0] > 0:
            lse = own_scores.logsumexp(dim=0)
            out = ((own_scores - lse).exp().unsqueeze(-1) * own_values).sum(0)
        for block in blocks:
            rows, cols = block.queries, block.keys
            part, part_lse = block_forward(query[:, rows], key[:, cols], value[:, cols], block.is_causal, scale)
            merged = torch.logaddexp(lse[:, rows], part_lse)
            out[:, rows] *= (lse[:, rows] - merged).exp().unsqueeze(-1)
            out[:, rows] += part * (part_lse - merged).exp().unsqueeze(-1)
            lse[:, rows] = merged
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, own_keys, own_values, out, lse, own_scores)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, own_keys, own_values, out, lse, own_scores = ctx.saved_tensors
        grad_out = grad_out.to(query.dtype)
        # Gradients of the own-row part, written out.
        probs = (own_scores - lse).exp()  # shape: [step, heads, M]
        delta = (grad_out * out).sum(-1, dtype=torch.float32)  # shape: [heads, M]
        grad_scores = probs * ((grad_out * own_values).sum(-1, dtype=torch.float32) - delta) * ctx.scale
        grad_scores = grad_scores.unsqueeze(-1).to(query.dtype)
        grad_query = (grad_scores * own_keys).sum(0)
        grad_own_keys = grad_scores * query
        grad_own_values = probs.unsqueeze(-1).to(query.dtype) * grad_out
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        for block in ctx.blocks:
            rows, cols = block.queries, block.keys
            parts = block_backward(
                grad_out[:, rows], query[:, rows], key[:, cols], value[:, cols], out[:, rows], lse[:, rows],
                block.is_causal, ctx.scale,
            )  # fmt: skip
            grad_query[:, rows] += parts[0]
            grad_key[:, cols] += parts[1]
            grad_value[:, cols] += parts[2]
        return grad_query, grad_key, grad_value, grad_own_keys, grad_own_values, None, None


def block_forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output (heads, M, head_dim) and log-sum-exp (heads, M) of one block."""
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None], key[None], value[None], 0.0, is_causal, scale=scale
        )
        return out[0], lse[0]
    return plain_block_forward(query, key, value, is_causal, scale)


def block_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for query, key and value of one block, given output and log-sum-exp over *all* keys."""
    if query.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out[None].contiguous(), query[None], key[None], value[None], out[None], lse[None].contiguous(),
            0.0, is_causal, scale=scale,
        )  # fmt: skip
        return grads[0][0], grads[1][0], grads[2][0]
    return plain_block_backward(grad_out, query, key, value, out, lse, is_causal, scale)


def _chunk_scores(query: Tensor, key: Tensor, start: int, is_causal: bool, scale: float) -> Tensor:
    """Scores of the queries from `start` on, shape [heads, chunk, keys]."""
    scores = (query[:, start : start + QUERY_CHUNK] @ key.transpose(1, 2)).float() * scale
    if is_causal:
        rows = torch.arange(start, start + scores.shape[1], device=query.device)
        cols = torch.arange(key.shape[1], device=query.device)
        scores.masked_fill_(cols[None, :] > rows[:, None], float("-inf"))
    return scores


def plain_block_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """[`block_forward`] without a flash kernel: any device, memory bounded by `QUERY_CHUNK`."""
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2], device=query.device)
    for start in range(0, query.shape[1], QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        scores = _chunk_scores(query, key, start, is_causal, scale)
        lse[:, rows] = scores.logsumexp(dim=-1)
        out[:, rows] = (scores - lse[:, rows, None]).exp().to(value.dtype) @ value
    return out, lse


def plain_block_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """[`block_backward`] without a flash kernel."""
    delta = (grad_out * out).sum(-1, keepdim=True, dtype=torch.float32)  # shape: [heads, M, 1]
    grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for start in range(0, query.shape[1], QUERY_CHUNK):
        rows = slice(start, start + QUERY_CHUNK)
        probs = (_chunk_scores(query, key, start, is_causal, scale) - lse[:, rows, None]).exp()
        grad_value += probs.to(value.dtype).transpose(1, 2) @ grad_out[:, rows]
        grad_probs = (grad_out[:, rows] @ value.transpose(1, 2)).float()
        grad_scores = (probs * (grad_probs - delta[:, rows]) * scale).to(query.dtype)
        grad_query[:, rows] = grad_scores @ key
        grad_key += grad_scores.transpose(1, 2) @ query[:, rows]
    return grad_query, grad_key, grad_value
