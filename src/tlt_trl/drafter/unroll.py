"""Run the drafter over a packed batch for several draft steps, each on the output of the one before."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .attention import step_blocks, unrolled_attention
from .modeling_drafter import Drafter
from .packing import PackedBatch


def unroll(drafter: Drafter, batch: PackedBatch, embed_tokens: Tensor, num_steps: int) -> Iterator[Tensor]:
    """
    Training-time test (EAGLE-3, arXiv 2503.01840): draft step j is fed the drafter's own states of step j - 1, as in
    the engine, and the embedding of the token that the policy really produced.

    Prompt tokens only provide keys and values; queries, MLP and later steps are computed only for rows with a label.

    Args:
        drafter ([`Drafter`]):
            The drafter.
        batch ([`PackedBatch`]):
            On the drafter's device.
        embed_tokens (`torch.Tensor` of shape (vocab_size, H)):
            The policy's embedding, in the dtype to compute in.
        num_steps (`int`):
            Number of draft steps.

    Yields:
        `torch.Tensor` of shape (rows of the step, H): for every step the hidden states before the final norm at
        `batch.rows(step)`.
    """
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    hidden = drafter.fc(batch.aux_hidden_states.to(embed_tokens.dtype))  # shape: [N, H]
    rotary = drafter.rotary(batch.position_ids, hidden)
    # The last token of a document is paired with a token of the next one. Nothing reads that row.
    inputs = layer.attention_inputs(embed_tokens[batch.input_ids.roll(-1)], hidden)
    key, value = (_per_query_head(states, drafter) for states in attention.key_value(inputs, rotary))
    rows = batch.rows(0)
    inputs, hidden = inputs[rows], hidden[rows]
    query = attention.query(inputs, (rotary[0][rows], rotary[1][rows]))
    own_keys = own_values = key.new_empty(0, *query.shape)
    for step in range(num_steps):
        if step > 0:
            previous, rows = rows, batch.rows(step)
            kept = torch.searchsorted(previous, rows)
            hidden, own_keys, own_values = hidden[kept], own_keys[:, :, kept], own_values[:, :, kept]
            rotary = drafter.rotary(batch.position_ids[rows] + step, hidden)
            inputs = layer.attention_inputs(embed_tokens[batch.input_ids[rows + 1 + step]], hidden)
            new_key, new_value = (_per_query_head(states, drafter) for states in attention.key_value(inputs, rotary))
            own_keys = torch.cat([own_keys, new_key[None]])
            own_values = torch.cat([own_values, new_value[None]])
            query = attention.query(inputs, rotary)
        attended = unrolled_attention(
            query, key, value, own_keys, own_values, step_blocks(batch, step), attention.scale
        )
        hidden = layer.finish(attended, hidden)
        yield hidden


def _per_query_head(states: Tensor, drafter: Drafter) -> Tensor:
    """(kv_heads, N, head_dim) to (heads, N, head_dim)."""
    attention = drafter.midlayer.self_attn
    return states.repeat_interleave(attention.num_heads // attention.num_kv_heads, dim=0)
