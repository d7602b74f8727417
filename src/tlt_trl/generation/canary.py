"""
The canary: checks of a running engine that it is exact under speculation.

Speculative sampling (arXiv 2211.17192) keeps the sampled distribution, if the engine implements it correctly. Engines
have got it wrong without an error: a temperature read from uninitialised memory, shifted log-probs, a greedy check
under sampling. The text still looks right, but training on it changes what is learnt.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor


if TYPE_CHECKING:
    from .engine import RolloutEngine


logger = logging.getLogger(__name__)


# Any tokens will do: the check compares two passes over the engine's own answer.
CANARY_PROMPT = list(range(4, 12))
CANARY_TOKENS = 24
MIN_CANARY_TOKENS = 4  # fewer would hardly verify a draft
VOCAB_SIZE = 32
NUM_REQUESTS = 10_000
NUM_DRAFT_TOKENS = 3
TEMPERATURES = (0.7, 1.0)
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"top_k": 20})
FALSE_ALARM_RATE = 1e-6  # of the whole canary, over its random draws (the seed is fixed all the same)
SAMPLER_LOGPROB_TOLERANCE = 1e-3  # same float32 logits, two formulas
# Two passes over the same tokens in different shapes: bfloat16 rounds each hidden state to 8 bits.
ENGINE_LOGPROB_TOLERANCES = {
    torch.bfloat16: {"mean": 0.05, "max": 0.75},
    torch.float16: {"mean": 0.02, "max": 0.3},
    torch.float32: {"mean": 1e-3, "max": 2e-2},
}


class InexactEngineError(RuntimeError):
    """The engine's speculative sampling does not follow the policy's distribution."""


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """
    Outcome of one check.

    Attributes:
        name (`str`):
            What was checked.
        ok (`bool`):
            Whether it passed.
        detail (`str`):
            Numbers, and the likely cause when it failed.
    """

    name: str
    ok: bool
    detail: str


def exact_probabilities(logits: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """
    The distribution that sampling must follow: temperature, then top-k, then top-p over what is left.

    Args:
        logits (`torch.Tensor` of shape (..., vocab_size)):
            Logits of the policy.

    Returns:
        `torch.Tensor` of the same shape, float64.
    """
    scaled = logits.double() / temperature
    if top_k:
        threshold = scaled.topk(top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < threshold, -math.inf)
    probabilities = scaled.softmax(dim=-1)
    if top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        # A token is kept while the mass before it is below top_p.
        dropped = ordered.cumsum(dim=-1) - ordered >= top_p
        kept = torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(dropped, 0.0))
        probabilities = kept / kept.sum(dim=-1, keepdim=True)
    return probabilities


def chi_square_p_value(counts: Tensor, probabilities: Tensor, min_expected: float = 5.0) -> float:
    """
    Probability of a deviation at least as large as the observed one, if the samples follow `probabilities`.

    Cells that expect fewer than `min_expected` samples are merged into one. A sample in a cell of probability zero
    gives 0.0, whatever the rest looks like.

    Args:
        counts (`torch.Tensor` of shape (num_cells,)):
            Samples per cell.
        probabilities (`torch.Tensor` of shape (num_cells,)):
            Probability of each cell.
    """
    counts, probabilities = counts.double(), probabilities.double()
    if counts[probabilities == 0].sum() > 0:
        return 0.0
    expected = probabilities * counts.sum()
    small = expected < min_expected
    observed = torch.cat([counts[~small], counts[small].sum()[None]])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    if degrees < 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor(degrees / 2.0, dtype=torch.float64), statistic / 2).item()


# `rejection_sample(logits, draft_token_ids, draft_probs, temperature, top_p, top_k) -> (tokens, logprobs)`, see
# `RolloutEngine.rejection_sample`.
RejectionSample = Callable[[Tensor, Tensor, Tensor | None, Tensor, float, int], tuple[Tensor, Tensor]]


def check_sampler(
    rejection_sample: RejectionSample, device: torch.device, num_requests: int = NUM_REQUESTS, seed: int = 1
) -> list[CanaryResult]:
    """
    Compares frequencies of the engine's rejection sampler with the exact distribution, on logits made here.

    Requests of two temperatures alternate in one batch, so that a value read from the wrong request shows too.

    Args:
        rejection_sample (`RejectionSample`):
            The engine's sampler.
        device (`torch.device`):
            Where the engine samples.
        num_requests (`int`, *optional*, defaults to `10000`):
            Samples per case; with the default a temperature that is off by 10 % is caught.
        seed (`int`, *optional*, defaults to `1`):
            Seed of the engine's draws; the random state of the process is left as it was.
    """
    cases = [(filters, kind) for filters in FILTERS for kind in ("one-hot", "probabilistic")]
    num_tests = len(cases) * len(TEMPERATURES) * (NUM_DRAFT_TOKENS + 1)
    threshold = FALSE_ALARM_RATE / num_tests
    generator = torch.Generator().manual_seed(0)
    # shape: (NUM_DRAFT_TOKENS + 1, VOCAB_SIZE); a spread of 2 leaves both likely and rare tokens
    logits = 2.0 * torch.randn(NUM_DRAFT_TOKENS + 1, VOCAB_SIZE, generator=generator)
    # A drafter that is neither the policy nor far from it: every branch of the rule is taken often.
    draft_probabilities = (0.7 * logits[:-1] + 0.7 * torch.randn(logits[:-1].shape, generator=generator)).softmax(-1)
    drafts = torch.stack(
        [torch.multinomial(row, num_requests, True, generator=generator) for row in draft_probabilities], dim=1
    )
    temperatures = torch.tensor(TEMPERATURES).repeat(num_requests)[:num_requests]
    results = []
    for filters, kind in cases:
        probs = draft_probabilities.expand(num_requests, -1, -1) if kind == "probabilistic" else None
        label = f"{kind} drafts" + "".join(f", {name}={value}" for name, value in filters.items())
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            try:
                tokens, logprobs = rejection_sample(
                    logits.expand(num_requests, -1, -1).to(device),
                    drafts.to(device),
                    None if probs is None else probs.to(device),
                    temperatures.to(device),
                    filters.get("top_p", 1.0),
                    filters.get("top_k", 0),
                )
            except (RuntimeError, IndexError) as error:  # a filter read from the wrong place may fail in any way
                results.append(CanaryResult(f"sampler ({label})", False, f"it failed: {error}"))
                continue
        tokens, logprobs = tokens.cpu(), logprobs.cpu()
        for temperature in TEMPERATURES:
            rows = temperatures == temperature
            exact = exact_probabilities(logits, temperature, **filters)
            results.append(_check_frequencies(tokens[rows], exact, threshold, f"{label}, temperature={temperature}"))
            results.append(_check_logprobs(tokens[rows], logprobs[rows], exact, f"{label}, temperature={temperature}"))
    return results


def _check_frequencies(tokens: Tensor, exact: Tensor, threshold: float, label: str) -> CanaryResult:
    """`tokens` of shape (num_requests, k + 1), -1 after the first rejection; `exact` of shape (k + 1, vocab_size)."""
    worst = 1.0
    for position, probabilities in enumerate(exact):
        # Whether a position is reached does not depend on what is sampled there, so no correction is needed.
        reached = tokens[:, position]
        reached = reached[reached >= 0]
        worst = min(worst, chi_square_p_value(torch.bincount(reached, minlength=len(probabilities)), probabilities))
    name = f"sampled distribution ({label})"
    if worst >= threshold:
        return CanaryResult(name, True, f"chi-square p = {worst:.2g} at worst")
    return CanaryResult(
        name,
        False,
        f"chi-square p = {worst:.2g}, below {threshold:.2g}: the engine does not sample with the temperature (or "
        "top_p, top_k) that it was given",
    )


def _check_logprobs(tokens: Tensor, logprobs: Tensor, exact: Tensor, label: str) -> CanaryResult:
    emitted = tokens >= 0
    wanted = exact.log()[torch.arange(len(exact)), tokens.clamp_min(0)]
    difference = (wanted - logprobs.double())[emitted].abs().max().item()
    ok = difference <= SAMPLER_LOGPROB_TOLERANCE
    cause = "" if ok else ": the engine returns log-probs of another distribution or of another token"
    return CanaryResult(f"log-probs of the sampler ({label})", ok, f"largest difference {difference:.2g}{cause}")


def check_engine_logprobs(speculative: Tensor, plain: Tensor, dtype: torch.dtype) -> CanaryResult:
    """
    Compares the log-probs that came with speculative samples with those of a plain pass over the same tokens.

    Args:
        speculative, plain (`torch.Tensor` of shape (num_tokens,)):
            Log-probs of the same tokens.
        dtype (`torch.dtype`):
            Dtype of the engine, which decides the tolerance.
    """
    tolerance = ENGINE_LOGPROB_TOLERANCES[dtype]
    difference = (speculative - plain).abs()
    mean, largest = difference.mean().item(), difference.max().item()
    ok = mean <= tolerance["mean"] and largest <= tolerance["max"]
    detail = (
        f"mean difference {mean:.2g} (allowed {tolerance['mean']}), largest {largest:.2g} (allowed {tolerance['max']})"
    )
    cause = "" if ok else ": log-probs under speculation are not those of the policy"
    return CanaryResult("log-probs under speculation", ok, detail + cause)


def run_canary(engine: "RolloutEngine", has_weights: bool = True) -> list[CanaryResult]:
    """
    All checks of an engine with a drafter.

    Args:
        engine ([`RolloutEngine`]):
            The engine, before it has any requests.
        has_weights (`bool`, *optional*, defaults to `True`):
            Whether the policy can run; an engine that sleeps at level 2 has no weights, but still its sampler.
    """
    results = check_sampler(engine.rejection_sample, engine.device)
    if has_weights:
        # The plain pass samples one more token, and vLLM keeps a position free.
        num_tokens = min(CANARY_TOKENS, engine.max_model_len - len(CANARY_PROMPT) - 2)
        if num_tokens < MIN_CANARY_TOKENS:
            logger.warning(
                "Log-probs under speculation were not checked: a context of %d tokens is too short for it. The "
                "engine's sampler was.",
                engine.max_model_len,
            )
            return results
        speculative, plain = engine.speculative_and_plain_logprobs(CANARY_PROMPT, num_tokens=num_tokens)
        results.append(check_engine_logprobs(speculative, plain, engine.dtype))
    return results


def failure_message(results: list[CanaryResult]) -> str:
    """Message for the checks that failed."""
    failed = [result for result in results if not result.ok]
    lines = "\n".join(f"  - {result.name}: {result.detail}" for result in failed)
    return (
        f"{len(failed)} of {len(results)} checks say that this engine is not exact under speculation:\n{lines}\n"
        "Training on its speculative samples would change what is learnt. Run `tlt-trl doctor` for a report."
    )
