"""The checks of `tlt-trl doctor` that need torch, transformers and vLLM."""

import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..drafter import Drafter
from ..generation.canary import run_canary
from ..generation.engine import RolloutEngine
from ..generation.policy_checks import why_type_is_unsupported
from ..generation.sampling_parameters import HONOURED_PARAMETERS, REFUSED_PARAMETERS, REFUSED_WITH_ADAPTIVE_LENGTHS
from ..generation.standalone import build_llm
from .findings import Finding


MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 512
MAX_DRAFT_TOKENS = 3


def check_device() -> Iterator[Finding]:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        yield Finding("device", properties.name, f"{properties.total_memory / 2**30:.0f} GiB")
    else:
        yield Finding("device", "CPU", f"{torch.get_num_threads()} threads of {platform.processor() or 'unknown'}")


def check_model(model: str) -> Iterator[Finding]:
    """Whether vLLM can draft for this policy at all."""
    problem = _no_model(model)
    if problem is not None:
        yield Finding("model", "policy", problem, False)
        return
    try:
        config = AutoConfig.from_pretrained(model)
    except OSError as error:  # which does not name the model where there is no network
        raise OSError(f"{model}: {error}") from error
    architectures = config.architectures or []
    name = ", ".join(architectures)
    reason = why_type_is_unsupported(config, architectures)
    if reason is None:
        yield Finding("model", name, "gives away the hidden states that a drafter reads", True)
        yield Finding("methods", "eagle3, greedy drafts", "available", True)
        yield Finding("methods", "eagle3, probabilistic drafts", "available", True)
    else:
        yield Finding("model", name, reason, False)


def _no_model(model: str) -> str | None:
    """Why a name cannot be that of a model, where transformers' answer would be about something else."""
    path = Path(model)
    if path.is_dir():
        if (path / "config.json").is_file():
            return None
        return f"the folder {model} holds no config.json: it is none that `save_pretrained` has written."
    if path.is_absolute() or model.startswith(".") or path.exists() or model.count("/") > 1:
        return f"{model} is no folder, and no id of the Hub either."
    return None


def check_drafter(model: str, drafter: str | None, folder: str) -> Iterator[Finding]:
    """Whether the drafter fits; where none is given, one is made from the policy and saved to `folder`."""
    if drafter is None:
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        Drafter.from_policy(policy).save_pretrained(folder)
        yield Finding("drafter", "fit", "none given; one was made from the policy for these checks", True)
        return
    problem = _no_model(drafter)
    if problem is None:
        Drafter.from_pretrained(drafter, AutoConfig.from_pretrained(model))
    yield Finding("drafter", "fit", f"{drafter} fits" if problem is None else problem, problem is None)


def check_engine(model: str, drafter: str, **engine_kwargs) -> Iterator[Finding]:
    """The canary, in an engine built as the trainer builds it, and what the KV cache has room for."""
    context = AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings
    max_model_len = min(MAX_MODEL_LEN, context)
    llm = build_llm(
        model,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=max_model_len,
        drafter=drafter,
        max_draft_tokens=MAX_DRAFT_TOKENS,
        enforce_eager=True,
        **engine_kwargs,
    )
    engine = RolloutEngine(llm)
    started = time.perf_counter()
    results = run_canary(engine)
    seconds = time.perf_counter() - started
    for result in results:
        yield Finding("canary", result.name, result.detail, result.ok)
    yield Finding("canary", "time", f"{seconds:.1f} s, the compilation of the sampler included")
    tokens = engine.kv_cache_tokens
    fits = tokens / max_model_len
    yield Finding(
        "memory",
        "KV cache",
        f"{tokens} tokens, or {fits:.0f} requests of {max_model_len} tokens",
        tokens >= max_model_len,
    )


def list_parameters() -> Iterator[Finding]:
    """Sampling parameters and what becomes of them under speculation."""
    yield Finding("sampling parameters", "honoured", ", ".join(HONOURED_PARAMETERS))
    for name, (_, remedy) in REFUSED_PARAMETERS.items():
        yield Finding("sampling parameters", f"{name} refused", remedy)
    for name, (_, remedy) in REFUSED_WITH_ADAPTIVE_LENGTHS.items():
        yield Finding("sampling parameters", f"{name} refused with adaptive draft lengths", remedy)
