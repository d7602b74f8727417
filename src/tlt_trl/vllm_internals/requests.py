"""Requests that a speculating engine of vLLM refuses, and that it can run in plain steps."""

from .contract import replace, require
from .parts import EngineParts


def accept_requests_for_plain_steps(parts: EngineParts) -> None:
    """
    Lets a speculating engine take requests with `min_p` or `logit_bias`.

    vLLM 0.31 refuses them because it cannot apply either to draft tokens, and builds no processors for them. The
    scheduler proposes nothing while a request runs that is not exact under speculation (see
    [`~tlt_trl.vllm_internals.scheduler.SteeredScheduler`]), so here all of their tokens are sampled plainly.
    """
    from vllm.utils.platform_utils import is_pin_memory_available
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor

    # Read for nothing but the refusal.
    replace(require(parts.llm_engine, "input_processor"), "speculative_config", None)
    processors = require(parts.runner, "input_batch.logitsprocs")
    for kind in (MinPLogitsProcessor, LogitBiasLogitsProcessor):
        processor = kind(parts.config, parts.device, is_pin_memory_available())
        is_invariant = processor.is_argmax_invariant()
        (processors.argmax_invariant if is_invariant else processors.non_argmax_invariant).append(processor)
