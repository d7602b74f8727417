"""vLLM's EAGLE proposer, steered: it does no work in steps without draft tokens, and its drafts are exact."""

from collections.abc import Callable
from typing import Any

import torch

from ..strategy.strategy import Strategy
from .contract import replace, require


# Inputs kept at most before their keys and values are written all the same. A token takes two bytes for each hidden
# unit of the policy layers that the drafter reads.
MAX_DEFERRED_TOKENS = 2048


class SteeredProposer:
    """
    Takes the place of three methods of vLLM's proposer.

    vLLM runs the drafter's first pass in every step, with 0 draft tokens too, since the drafter's KV cache must hold
    every token before it can draft again. For a drafter of one layer, keys and values depend on that layer's input
    alone: they can be computed later, for many steps at once, without attention, MLP or head. So the inputs of steps
    without draft tokens are kept, and their keys and values are written when drafting comes back.

    Args:
        proposer:
            vLLM's proposer.
        can_defer (`bool`):
            Whether steps without draft tokens can be free; `False` lets vLLM run the drafter in every step.
        has_grammar (`Callable[[], bool]`):
            Whether a running request has structured outputs.
    """

    def __init__(self, proposer: Any, can_defer: bool, has_grammar: Callable[[], bool]):
        self.can_defer = can_defer
        self.is_probabilistic = False
        self.num_deferred_tokens = 0
        self._deferred: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._has_grammar = has_grammar
        self._proposer = proposer
        self._model = require(proposer, "model")
        for name in ("_last_draft_probs", "_enable_probabilistic_draft_probs"):
            require(proposer, name)
        self._propose = replace(proposer, "propose", self.propose)
        self._sample = replace(proposer, "_sample_draft_tokens", self._sample_draft_tokens)
        replace(proposer, "_greedy_sample", self._greedy_draft_tokens)

    def use(self, strategy: Strategy) -> None:
        """Drafts as this strategy says from the next proposal on. Greedy and probabilistic drafts are both exact."""
        if strategy.method == "eagle3":
            self.is_probabilistic = strategy.draft_sampling == "probabilistic"

    def propose(self, num_speculative_tokens: int, **inputs: Any) -> torch.Tensor:
        """
        Draft tokens of one step, of shape (batch_size, num_speculative_tokens).

        vLLM's scheduler drops a draft token that a grammar forbids. With probabilistic drafts, whether one is dropped
        depends on which was drawn: the position is sampled as if nothing had been drafted, and text no longer follows
        the policy. So drafts are greedy while a request has a grammar.
        """
        if num_speculative_tokens == 0 and self.can_defer:
            return self._defer(**inputs)
        self.catch_up()
        self._proposer._enable_probabilistic_draft_probs = self.is_probabilistic and not self._has_grammar()
        return self._propose(num_speculative_tokens, **inputs)

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Writes the keys and values of all inputs that were kept."""
        if not self._deferred:
            return
        input_ids, positions, aux_hidden_states, slots = (
            torch.cat(parts, dim=-1 if parts[0].dim() == 1 else 0) for parts in zip(*self._deferred, strict=True)
        )
        self.discard()
        newest = _last_of_each(slots)
        model, layer = self._model, self._model.model.layers[0]
        embeds = layer.input_layernorm(model.embed_input_ids(input_ids[newest]))
        hidden_states = layer.hidden_norm(model.combine_hidden_states(aux_hidden_states[newest]))
        attention = layer.self_attn
        qkv, _ = attention.qkv_proj(torch.cat([embeds, hidden_states], dim=-1))
        query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        _, key = attention.rotary_emb(positions[newest], query, key)
        shape = (-1, attention.attn.num_kv_heads, attention.attn.head_size)
        attention.attn.impl.do_kv_cache_update(
            attention.attn, key.reshape(shape), value.reshape(shape), attention.attn.kv_cache, slots[newest]
        )

    def discard(self) -> None:
        """Forgets the inputs that were kept: the KV cache that they belong to is gone."""
        self._deferred, self.num_deferred_tokens = [], 0

    def _defer(
        self,
        target_token_ids,
        target_positions,
        target_hidden_states,
        next_token_ids,
        token_indices_to_sample,
        common_attn_metadata,
        **_,
    ) -> torch.Tensor:
        # Position t holds the token after it, as in the proposer's own first pass; the last one was just sampled. What
        # lies behind it was rejected: those keys and values are overwritten when their positions are sampled again.
        input_ids = target_token_ids.roll(-1)
        if token_indices_to_sample is None:
            token_indices_to_sample = common_attn_metadata.query_start_loc[1:] - 1
        input_ids[token_indices_to_sample] = next_token_ids.to(input_ids.dtype)
        # The engine reuses its buffers in the next step, so all of them are copied.
        slots = common_attn_metadata.slot_mapping[: len(input_ids)].clone()
        self._deferred.append((input_ids, target_positions.clone(), target_hidden_states.clone(), slots))
        self.num_deferred_tokens += len(input_ids)
        if self.num_deferred_tokens >= MAX_DEFERRED_TOKENS:
            self.catch_up()
        # The engine takes them from here after every call. Left in place, those of an earlier draft would be what
        # looked-up tokens are verified against, and text would no longer follow the policy.
        self._proposer._last_draft_probs = None
        return torch.empty(common_attn_metadata.num_reqs, 0, dtype=torch.int64, device=target_token_ids.device)

    def _greedy_draft_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        The drafter's best tokens, from its own vocabulary.

        vLLM scatters the reduced vocabulary's logits into a row as wide as the policy's and takes the maximum there.
        """
        model = self._model
        draft_ids = model.logits_processor(model.lm_head, hidden_states).argmax(dim=-1)
        offsets = model.draft_id_to_target_id
        return draft_ids if offsets is None else draft_ids + offsets[draft_ids]

    def _sample_draft_tokens(self, hidden_states, sampling_metadata) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Draws draft tokens, and calls those certain whose probabilities are not finite, which is exact for any token.

        The rejection sampler would reject them and draw from a distribution that is not one: its last token, always.
        """
        tokens, probs = self._sample(hidden_states, sampling_metadata)
        if probs is not None:
            certain = torch.zeros_like(probs).scatter_(1, tokens[:, None].long(), 1.0)
            probs = torch.where(probs.sum(dim=-1, keepdim=True).isfinite(), probs, certain)
        return tokens, probs


def _last_of_each(slots: torch.Tensor) -> torch.Tensor:
    """
    Indices of the last occurrence of every slot, in order.

    A block that was freed and handed to another request occurs twice; written in one go, the older entry could win.
    """
    last = {slot: index for index, slot in enumerate(slots.tolist())}
    return torch.tensor(sorted(last.values()), device=slots.device)
