"""vLLM's output processor: tokens accepted behind a stop string are taken out of the completion."""

from typing import Any

from .contract import replace, require


def process_tokens_one_by_one(llm_engine: Any) -> None:
    """
    Hands the tokens of a request that has stop strings to the output processor one at a time.

    vLLM 0.31 looks for stop strings after it has taken all tokens of a step, and cuts the text but not the token ids:
    under speculation the tokens accepted behind a stop string stay in the completion and would be trained on.
    """
    from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

    processor = require(llm_engine, "output_processor")
    request_states = require(processor, "request_states")

    def has_stop_strings(request_id: str) -> bool:
        state = request_states.get(request_id)
        detokenizer = None if state is None else state.detokenizer
        return isinstance(detokenizer, BaseIncrementalDetokenizer) and bool(detokenizer.stop)

    def processed(engine_core_outputs, *args, **kwargs):
        one_by_one = []
        for output in engine_core_outputs:
            one_by_one += _split_by_token(output) if has_stop_strings(output.request_id) else [output]
        # Once a stop string is found the processor forgets the request and ignores the tokens that follow.
        return process_outputs(one_by_one, *args, **kwargs)

    process_outputs = replace(processor, "process_outputs", processed)


def _split_by_token(output: Any) -> list[Any]:
    """One `EngineCoreOutput` per token; what ends a request stays with the last, what comes once with the first."""
    import msgspec

    last = len(output.new_token_ids) - 1
    if last < 1:
        return [output]
    parts = []
    for position, token in enumerate(output.new_token_ids):
        changes: dict[str, Any] = {"new_token_ids": [token]}
        if output.new_logprobs is not None:
            changes["new_logprobs"] = output.new_logprobs.slice_request(position, 1)
        if position > 0:
            changes |= {"new_prompt_logprobs_tensors": None, "prefill_stats": None, "events": None}
        if position < last:
            changes |= {"finish_reason": None, "stop_reason": None, "routed_experts": None}
        parts.append(msgspec.structs.replace(output, **changes))
    return parts
