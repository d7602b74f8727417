"""
Repairs of vLLM's CPU backend, loaded in every engine process through the `vllm.general_plugins` entry point.

Each repair names the fault, is skipped when the installed vLLM no longer shows it, and has a test that fails without
it (tests/vllm_internals/test_cpu.py). `TLT_TRL_SKIP_CPU_REPAIRS=1` leaves the backend as it is; it exists so that
tests can prove that the faults are caught, never for training.
"""

import functools
import logging
import os

import torch

from .contract import replace, require


logger = logging.getLogger(__name__)

SKIP_VARIABLE = "TLT_TRL_SKIP_CPU_REPAIRS"


def register() -> None:
    """Entry point of the `vllm.general_plugins` group; a no-op on every platform but CPU. May run more than once."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or os.environ.get(SKIP_VARIABLE) == "1":
        return
    current_platform.import_kernels()  # the check below calls the C++ kernel
    repair_expand_kernel()
    register_kernel_overrides_once()
    speed_up_recovered_tokens()


def expand_kernel(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """
    Repeats one value per request for each of its draft tokens, in place.

    The parameter names are those of vLLM's Triton kernel, which the dispatcher matches by name.

    Args:
        output (`torch.Tensor`):
            Written in place, shape (num_tokens,).
        input_val (`torch.Tensor`):
            One value per request, shape (batch_size,).
        cu_num_tokens (`torch.Tensor`):
            Cumulative number of draft tokens, shape (batch_size,).
        replace_from (`float`):
            Value to replace.
        replace_to (`float`):
            Value that stands in for `replace_from`.
        MAX_NUM_TOKENS (`int`, *optional*):
            Block size of the Triton kernel; meaningless here.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = input_val.repeat_interleave(counts)
    output.copy_(expanded.masked_fill(expanded == replace_from, replace_to))


def repair_expand_kernel() -> None:
    """
    Replaces `_expand_kernel_impl`, which writes its result into a temporary.

    vLLM 0.31.0 converts a float (or int32) output to a new int64 tensor and lets the kernel fill that one, so
    `expand_batch_to_tokens` returns uninitialised memory for temperature, top_p and top_k: at temperature > 0 the
    sampled distribution is wrong and next to nothing is accepted.
    """
    from vllm.utils import cpu_triton_utils

    installed = require(cpu_triton_utils, "_expand_kernel_impl")
    if installed is expand_kernel or expand_works(installed):
        return
    cpu_triton_utils._expand_kernel_impl = expand_kernel


def expand_works(kernel) -> bool:
    """Whether `kernel` expands a float tensor as vLLM's rejection sampler needs it."""
    # shape: (3,); NaN can not survive a working kernel
    output = torch.full((3,), float("nan"))
    kernel(output, torch.tensor([0.5, 0.0]), torch.tensor([1, 3], dtype=torch.int32), 0, 1)
    return output.tolist() == [0.5, 1.0, 1.0]


def register_kernel_overrides_once() -> None:
    """
    Makes `CpuPlatform.register_triton_kernel_overrides` idempotent.

    Every worker calls it. The second engine of a process would wrap the wrappers of the first, and after an n-gram
    engine the call fails because the names no longer resolve to the kernels that the registry expects.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = require(CpuPlatform, "register_triton_kernel_overrides")
    if isinstance(original, functools._lru_cache_wrapper):
        return
    CpuPlatform.register_triton_kernel_overrides = staticmethod(functools.lru_cache(maxsize=1)(original))


def speed_up_recovered_tokens() -> None:
    """
    Replaces `sample_recovered_tokens`, which draws one exponential number per request and vocabulary entry.

    Only speculating engines call it. For 8 requests and a vocabulary of 49 152 the draw alone takes 12 ms on one
    thread, a third of a step of a 135M policy; [`sample_recovered_tokens`] needs one uniform number per draft token.
    """
    from vllm.v1.sample import rejection_sampler

    require(rejection_sampler, "sample_recovered_tokens")
    rejection_sampler.sample_recovered_tokens = sample_recovered_tokens


def sample_recovered_tokens(
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    sampling_metadata,
    device: torch.device,
    use_fp64_gumbel: bool = False,
) -> torch.Tensor:
    """
    A token for each draft position, in case its draft token is rejected: sampled from what the policy's distribution
    has more than the drafter's, by inverting the cumulative distribution in float64.

    Name and parameters are those of the function of vLLM's rejection sampler that it replaces.

    Args:
        num_draft_tokens (`list[int]`):
            Draft tokens of each request.
        draft_token_ids (`torch.Tensor`):
            Draft tokens, shape (num_tokens,).
        draft_probs (`torch.Tensor`, *optional*):
            Distributions that the draft tokens were sampled from, shape (num_tokens, vocab_size); `None` for greedy
            drafts, whose distribution is one at the draft token.
        target_probs (`torch.Tensor`):
            The policy's distributions, shape (num_tokens, vocab_size). Not changed.
        sampling_metadata:
            Holds the generators of the requests that have a seed of their own.

    Returns:
        `torch.Tensor`: Token ids, shape (num_tokens,), in the dtype of `draft_token_ids`.
    """
    uniform = torch.rand(len(draft_token_ids), dtype=torch.float64, device=device)
    start = 0
    for request, count in enumerate(num_draft_tokens):
        if count and request in sampling_metadata.generators:
            uniform[start : start + count].uniform_(generator=sampling_metadata.generators[request])
        start += count
    if draft_probs is not None:
        residual = (target_probs - draft_probs).clamp_min_(0.0)
        return invert(residual.cumsum(dim=-1, dtype=torch.float64), uniform).to(draft_token_ids.dtype)
    # Greedy drafts: the policy's distribution without the draft token. Its mass is jumped over instead of removed,
    # which saves a copy of the distributions.
    cumulative = target_probs.cumsum(dim=-1, dtype=torch.float64)
    draft = draft_token_ids.long()[:, None]
    upto = cumulative.gather(1, draft)
    before = torch.where(draft > 0, cumulative.gather(1, (draft - 1).clamp_min(0)), 0.0)
    point = uniform[:, None] * (cumulative[:, -1:] - (upto - before))
    point = torch.where(point < before, point, point + (upto - before))
    return _search(cumulative, point).to(draft_token_ids.dtype)


def sample_by_inversion(sampler) -> None:
    """
    Lets one engine's sampler draw by inverting the cumulative distribution too, in place.

    vLLM draws an exponential number per vocabulary entry here as well; for 8 requests that is 4 of the 27 ms of a
    plain step of a 135M policy on one thread. Requests with a seed of their own keep vLLM's way.

    Args:
        sampler (`vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler`):
            The sampler of the engine; other engines of the process are left as they are.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def forward(logits, generators, k, p):
        if generators or sampler.logprobs_mode != "processed_logprobs":
            return stock_forward(logits, generators, k, p)
        logprobs = apply_top_k_top_p(logits, k, p).log_softmax(dim=-1, dtype=torch.float32)
        uniform = torch.rand(len(logprobs), dtype=torch.float64, device=logprobs.device)
        return invert(logprobs.exp().cumsum(dim=-1, dtype=torch.float64), uniform), logprobs

    stock_forward = replace(sampler, "forward", forward)


def invert(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token of each row, drawn by inverting its cumulative mass, shape (num_rows, vocab_size)."""
    return _search(cumulative, uniform[:, None] * cumulative[:, -1:])


def _search(cumulative: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """First entry whose cumulative mass exceeds `point`; an entry of mass zero is never chosen."""
    # Rounding may lift a point to the total, behind the last entry that has mass.
    highest = torch.nextafter(cumulative[:, -1:], torch.zeros_like(point))
    found = torch.searchsorted(cumulative, torch.minimum(point, highest), right=True)[:, 0]
    return found.clamp_max(cumulative.shape[1] - 1)
