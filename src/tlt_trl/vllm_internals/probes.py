"""The canary's questions: what does this engine's own sampler do, and which log-probs does it return?"""

from typing import TYPE_CHECKING, Any

import torch

from ..strategy.strategy import Strategy
from .parts import EngineParts
from .scheduler import SteeredScheduler


if TYPE_CHECKING:
    from vllm import LLM


@torch.no_grad()
def rejection_sample(
    parts: EngineParts,
    logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    temperature: torch.Tensor,
    top_p: float,
    top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the engine's own rejection sampler on given logits, see [`RolloutEngine.rejection_sample`]."""
    batch_size, num_positions, vocab_size = logits.shape
    output = parts.verifier(
        draft_metadata(draft_token_ids, num_positions),
        None if draft_probs is None else draft_probs.reshape(-1, vocab_size).contiguous(),
        logits.reshape(-1, vocab_size).float().contiguous(),
        sampling_metadata(temperature, top_p, top_k),
    )
    logprobs = output.logprobs_tensors.logprobs[:, 0].view(batch_size, num_positions)
    return output.sampled_token_ids.long(), logprobs


def draft_metadata(draft_token_ids: torch.Tensor, num_positions: int) -> Any:
    """What vLLM says of draft tokens, shape (batch_size, num_positions - 1), when it verifies them."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    batch_size, device = len(draft_token_ids), draft_token_ids.device
    rows = torch.arange(batch_size * num_positions, dtype=torch.int32, device=device).view(batch_size, -1)
    return SpecDecodeMetadata(
        draft_token_ids=draft_token_ids.flatten().int(),
        num_draft_tokens=[num_positions - 1] * batch_size,
        cu_num_draft_tokens=rows[:, 0] // num_positions * (num_positions - 1) + num_positions - 1,
        cu_num_sampled_tokens=rows[:, -1] + 1,
        target_logits_indices=rows[:, :-1].flatten(),
        bonus_logits_indices=rows[:, -1].contiguous(),
        logits_indices=rows.flatten(),
    )


def sampling_metadata(temperature: torch.Tensor, top_p: float, top_k: int) -> Any:
    """What vLLM says of the sampling of a batch; `temperature` has shape (batch_size,)."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    batch_size, device = len(temperature), temperature.device
    ones = torch.ones(batch_size, device=device)
    return SamplingMetadata(
        temperature=temperature.clone(),
        all_greedy=False,
        all_random=True,
        top_p=ones * top_p if top_p < 1.0 else None,
        top_k=torch.full((batch_size,), top_k, dtype=torch.int32, device=device) if top_k else None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=ones * 0,
        presence_penalties=ones * 0,
        repetition_penalties=ones,
        output_token_ids=[[] for _ in range(batch_size)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def speculative_and_plain_logprobs(
    llm: "LLM",
    parts: EngineParts,
    scheduler: SteeredScheduler,
    prompt_token_ids: list[int],
    num_samples: int,
    num_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Samples with as many draft tokens as possible, then scores the same tokens in a plain pass. Both are left in the
    prefix cache.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Log-probs from the speculative rollout and from the plain pass, both of
        shape (tokens,).
    """
    from vllm import SamplingParams

    choose = scheduler.choose
    try:
        scheduler.choose = lambda batch_size: Strategy("eagle3", scheduler.max_draft_tokens)
        params = SamplingParams(temperature=1.0, max_tokens=num_tokens, logprobs=0, ignore_eos=True, detokenize=False)
        samples = _generate(llm, parts, [prompt_token_ids] * num_samples, params)
        scheduler.choose = lambda batch_size: Strategy.off()
        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        scored = _generate(llm, parts, [prompt_token_ids + list(s.outputs[0].token_ids) for s in samples], params)
    finally:
        scheduler.choose = choose
    speculative, plain = [], []
    for sample, in_pass in zip(samples, scored, strict=True):
        completion = sample.outputs[0]
        answer = in_pass.prompt_logprobs[len(prompt_token_ids) :]
        for token, at_sampling, at_scoring in zip(completion.token_ids, completion.logprobs, answer, strict=True):
            speculative.append(at_sampling[token].logprob)
            plain.append(at_scoring[token].logprob)
    return torch.tensor(speculative), torch.tensor(plain)


def _generate(llm: "LLM", parts: EngineParts, prompts: list[list[int]], params: Any) -> list[Any]:
    """Request outputs in the order of the prompts."""
    llm.enqueue([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    finished = []
    while parts.has_unfinished_requests():
        finished += [output for output in parts.llm_engine.step() if output.finished]
    return sorted(finished, key=lambda output: int(output.request_id))
