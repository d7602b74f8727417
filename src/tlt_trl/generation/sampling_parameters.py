"""Sampling parameters under speculation: which are honoured, and with which a run goes on without it."""

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from vllm import SamplingParams

    from ..tlt_grpo_config import TLTGRPOConfig


# Parameters that vLLM does not honour while it speculates: the value that means "unset", and what to do instead.
# tests/lossless/test_sampling_parameters.py has one test per parameter against a plain run; what fails there is here.
REFUSED_PARAMETERS = {
    "min_p": (0.0, "vLLM cannot apply it to draft tokens; use `top_p` or `top_k` in its place"),
    "logit_bias": ({}, "vLLM cannot apply it to draft tokens; use `bad_words` or `allowed_token_ids`"),
    "min_tokens": (
        0,
        "vLLM does not count the draft tokens accepted in the same step and suppresses the end too long; leave it out",
    ),
    "thinking_token_budget": (None, "it was not checked with speculation; leave it out"),
    "repetition_detection": (None, "it was not checked with speculation; leave it out"),
    "trace_decode_token_ids": (None, "vLLM cannot replay tokens while it speculates; leave it out"),
}
# Honoured only while every step drafts the same number of tokens, greedily.
REFUSED_WITH_ADAPTIVE_LENGTHS = {
    "seed": (
        None,
        "a request draws as many random numbers as its drafts are long, and those lengths follow measured times, so "
        "the same seed gives other tokens; probabilistic drafts are drawn without it. Use "
        "`speculation_selector='fixed'` without a threshold and without probabilistic drafts, or `seed` of the "
        "training arguments",
    ),
}


# Under speculation these do what they do in a plain run; one test each.
HONOURED_PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "stop",
    "include_stop_str_in_output",
    "stop_token_ids",
    "max_tokens",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "logprobs",
)


def why_config_is_inexact(args: "TLTGRPOConfig") -> str | None:
    """What in the sampling of a config, of training or evaluation, the engine would not honour under speculation."""
    parameters = {"min_p": args.min_p} | (args.generation_kwargs or {})
    return why_inexact(parameters, adaptive=not args.repeats_seeds)


def why_inexact(parameters: Mapping[str, Any], adaptive: bool = True) -> str | None:
    """
    Which sampling parameter the engine would not honour under speculation, why, and what to do instead.

    Args:
        parameters (`Mapping[str, Any]`):
            Parameters by name; those that are `None` or at the value that means "unset" are fine.
        adaptive (`bool`, *optional*, defaults to `True`):
            Whether the number of draft tokens may change from step to step, or drafts are drawn at random.

    Returns:
        `str` or `None`: `None` when all of them are honoured.
    """
    for name, (unset, remedy) in _refused(adaptive).items():
        value = parameters.get(name)
        if value is not None and value != unset:
            return f"`{name}={value!r}` is not exact under speculation: {remedy}."
    return None


def inexact_parameter(params: "SamplingParams", repeats_seeds: bool) -> str | None:
    """
    Name of a parameter of one request that speculation would not honour.

    Args:
        params (`vllm.SamplingParams`):
            Parameters of the request.
        repeats_seeds (`bool`):
            Whether every step drafts the same number of tokens, greedily.

    Returns:
        `str` or `None`: `None` when the request is exact.
    """
    refused = _refused(adaptive=not repeats_seeds)
    values = attrgetter(*refused)(params)
    for (name, (unset, _)), value in zip(refused.items(), values, strict=True):
        if value is not None and value != unset:
            return name
    return None


def remedy_for(name: str) -> str:
    """What to do instead of setting that parameter, as a sentence."""
    remedy = _refused(adaptive=True)[name][1]
    return f"{remedy[0].upper()}{remedy[1:]}."


def _refused(adaptive: bool) -> dict[str, tuple[Any, str]]:
    return REFUSED_PARAMETERS | (REFUSED_WITH_ADAPTIVE_LENGTHS if adaptive else {})
