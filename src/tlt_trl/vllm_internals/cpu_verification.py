"""
Verification of draft tokens on CPU with one pass over the logits.

vLLM's rejection sampler makes float32 copies of all rows, two distributions and the log-probs of all of them.
Rejection sampling needs much less: of every row the normaliser and the probability of one token, and a whole
distribution only of the one row per request that a token is drawn from. For 8 requests with 6 rows of 49 152 tokens
this takes 2.4 ms instead of 11.3 on one core (`benchmarks/cpu_verification.py`).
"""

from typing import Any

import torch
from torch import Tensor

from .contract import replace, require
from .cpu import invert


PLACEHOLDER_TOKEN_ID = -1  # as vLLM marks what was rejected, and draft tokens that are padding


def verify_in_one_pass(rejection_sampler: Any) -> None:
    """
    Lets one engine's rejection sampler verify by [`verify`], in place, wherever a step asks for nothing else.

    Args:
        rejection_sampler (`vllm.v1.sample.rejection_sampler.RejectionSampler`):
            Of the engine; other engines of the process are left as they are.
    """
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    def forward(metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        if not is_plain_sampling(sampling_metadata, rejection_sampler.sampler.logprobs_mode):
            return stock_forward(metadata, draft_probs, logits, sampling_metadata)
        tokens, logprobs, ranks = verify(
            logits,
            sampling_metadata.temperature,
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            draft_probs,
        )
        logprobs_tensors = None
        if sampling_metadata.max_num_logprobs is not None:
            ids = tokens.clamp_min(0).view(-1, 1)
            logprobs_tensors = LogprobsTensors(ids, logprobs.view(-1, 1), ranks.view(-1))
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs_tensors)

    require(rejection_sampler, "sampler.logprobs_mode")
    stock_forward = replace(rejection_sampler, "forward", forward)


def is_plain_sampling(sampling_metadata: Any, logprobs_mode: str) -> bool:
    """Whether a step samples with temperatures alone, and is asked for log-probs of the sampled tokens at most."""
    from vllm.v1.sample.logits_processor.builtin import (
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
        MinTokensLogitsProcessor,
    )

    processors = sampling_metadata.logitsprocs
    changes_logits = {
        MinPLogitsProcessor: lambda processor: processor.min_p_count > 0,
        LogitBiasLogitsProcessor: lambda processor: bool(processor.biases),
        MinTokensLogitsProcessor: lambda processor: bool(processor.min_toks),
    }
    return (
        sampling_metadata.all_random
        and sampling_metadata.top_k is None
        and sampling_metadata.top_p is None
        and not sampling_metadata.generators
        and sampling_metadata.no_penalties
        and not sampling_metadata.bad_words_token_ids
        and sampling_metadata.allowed_token_ids_mask is None
        and sampling_metadata.thinking_budget_state_holder is None
        and not sampling_metadata.max_num_logprobs
        and logprobs_mode == "processed_logprobs"
        and all(
            type(processor) in changes_logits and not changes_logits[type(processor)](processor)
            for processor in (*processors.argmax_invariant, *processors.non_argmax_invariant)
        )
    )


def verify(
    logits: Tensor,
    temperature: Tensor,
    draft_token_ids: Tensor,
    num_draft_tokens: list[int],
    draft_probs: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Rejection sampling (https://huggingface.co/papers/2211.17192).

    Args:
        logits (`torch.Tensor` of shape (num_tokens + batch_size, vocab_size)):
            The policy's, for every draft token of a request and then for the token after the last one.
        temperature (`torch.Tensor` of shape (batch_size,)):
            Of each request, above 0.
        draft_token_ids (`torch.Tensor` of shape (num_tokens,)):
            Draft tokens of all requests; -1 is never accepted.
        num_draft_tokens (`list[int]`):
            Draft tokens of each request.
        draft_probs (`torch.Tensor` of shape (num_tokens, vocab_size), *optional*):
            Distributions that the draft tokens were sampled from; `None` for greedy drafts.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: Emitted tokens (-1 after the last), their log-probs and
        their ranks, all of shape (batch_size, longest draft + 1).
    """
    batch_size = len(num_draft_tokens)
    counts = torch.tensor(num_draft_tokens)
    first_draft = counts.cumsum(0) - counts  # shape: (batch_size,)
    first_row = first_draft + torch.arange(batch_size)
    row_temperature = temperature.repeat_interleave(counts + 1)  # shape: (num_tokens + batch_size,)
    normalisers = log_normalisers(logits, row_temperature)

    request_of = torch.arange(batch_size).repeat_interleave(counts)  # shape: (num_tokens,)
    draft_rows = torch.arange(len(draft_token_ids)) + request_of
    drafts = draft_token_ids.long()
    known = drafts.clamp_min(0)
    draft_logprobs = logits[draft_rows, known].float() / row_temperature[draft_rows] - normalisers[draft_rows]
    ratio = draft_logprobs.exp().double()
    if draft_probs is not None:
        proposed = draft_probs.gather(1, known[:, None])[:, 0].double()
        ratio = torch.where(proposed > 0, ratio / proposed, 0.0)  # as vLLM, which rejects what cannot be drafted
    accepted = (torch.rand(len(drafts), dtype=torch.float64) < ratio) & (drafts >= 0)
    num_accepted = _leading(accepted.tolist(), num_draft_tokens)  # shape: (batch_size,)

    # Of the row at which a request's draft ends: the first rejected one, or the one after its last draft token.
    last_rows = first_row + num_accepted
    probs = (logits[last_rows].float() / temperature[:, None]).softmax(-1)
    is_rejected = num_accepted < counts
    rejected = (first_draft + num_accepted)[is_rejected]
    if draft_probs is None:
        probs[is_rejected, known[rejected]] *= (drafts[rejected] < 0).float()
    else:
        probs[is_rejected] = (probs[is_rejected] - draft_probs[rejected]).clamp_min_(0.0)
    uniform = torch.rand(batch_size, dtype=torch.float64)
    last_tokens = invert(probs.cumsum(-1, dtype=torch.float64), uniform)

    positions = torch.arange(int(counts.max()) + 1)
    tokens = torch.full((batch_size, len(positions)), PLACEHOLDER_TOKEN_ID)
    tokens[positions < counts[:, None]] = drafts
    tokens[positions > num_accepted[:, None]] = PLACEHOLDER_TOKEN_ID
    tokens[torch.arange(batch_size), num_accepted] = last_tokens
    is_emitted = tokens >= 0
    rows = (first_row[:, None] + positions)[is_emitted]
    emitted = logits[rows, tokens[is_emitted]]
    logprobs, ranks = torch.zeros(tokens.shape), torch.zeros(tokens.shape, dtype=torch.int64)
    logprobs[is_emitted] = emitted.float() / row_temperature[rows] - normalisers[rows]
    ranks[is_emitted] = count_not_below(logits, rows, emitted)
    return tokens.int(), logprobs, ranks


def _leading(accepted: list[bool], num_draft_tokens: list[int]) -> Tensor:
    """Draft tokens of each request before the first one that was rejected."""
    leading, start = [], 0
    for count in num_draft_tokens:
        of_request = accepted[start : start + count]
        leading.append(of_request.index(False) if False in of_request else count)
        start += count
    return torch.tensor(leading)


# Compiled, so that no row is written in float32: the loops below read the logits where they are.
@torch.compile(dynamic=True)
def log_normalisers(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logarithm of the sum of exponentials of each row at its temperature, shape (num_rows,), in float32."""
    return (logits.float() / temperature[:, None]).logsumexp(-1)


@torch.compile(dynamic=True)
def count_not_below(logits: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """For each of some rows, the entries that are at least as large as a value of its own: the rank of a token."""
    return (logits[rows] >= values[:, None]).sum(-1)
