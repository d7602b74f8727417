"""Unfinished requests of an engine: which there are, taking one out with all that it has sampled, going on with it."""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .contract import require
from .parts import EngineParts


if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


# What a step makes of these parameters depends on the tokens before it at most through the set of those that occurred,
# in prompt or answer, so an answer that goes on as a prompt follows the same distribution. All others must be unset:
# presence and frequency penalties and bad words tell prompt and answer apart, stop strings and grammars have a state,
# a seed has a generator.
PARAMETERS_THAT_MOVE = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "max_tokens",
    "ignore_eos",
    "stop_token_ids",
    "allowed_token_ids",
    "logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "output_kind",
    "skip_clone",
    "skip_reading_prefix_cache",
}


@dataclass
class UnfinishedSample:
    """
    A sample that is not finished, with all that it takes to go on elsewhere. It can be pickled.

    Attributes:
        request_id (`str`):
            Name of the request as whoever added it knows it.
        prompt (`str`, *optional*), prompt_token_ids (`list[int]`):
            Its prompt.
        params (`vllm.SamplingParams`):
            As the request was added.
        token_ids (`list[int]`):
            Tokens sampled so far.
        logprobs (`list`, *optional*):
            Their log-probs, as vLLM returns them.
        cumulative_logprob (`float`, *optional*):
            Sum of the log-probs of the sampled tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: "SamplingParams"
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] | None = None
    cumulative_logprob: float | None = None

    def followed_by(self, token_ids: list[int], logprobs: list | None, cumulative: float | None) -> "UnfinishedSample":
        """This sample with more tokens."""
        return UnfinishedSample(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            self.params,
            self.token_ids + token_ids,
            None if logprobs is None else (self.logprobs or []) + logprobs,
            None if cumulative is None else (self.cumulative_logprob or 0.0) + cumulative,
        )

    @property
    def context_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.token_ids

    @property
    def params_left(self) -> "SamplingParams":
        """Parameters for what is still to be sampled."""
        params = self.params.clone()
        params.max_tokens = self.params.max_tokens - len(self.token_ids)
        return params


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """
    A request that an engine has not finished.

    Attributes:
        request_id (`str`):
            Name of the request as whoever added it knows it.
        num_tokens (`int`), num_context_tokens (`int`):
            Tokens sampled so far, and those with the prompt.
        can_move (`bool`):
            Whether it can go on elsewhere and follow the same distribution.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] | list[int]
    num_tokens: int
    num_context_tokens: int
    can_move: bool


class EngineRequests:
    """
    The unfinished requests of one engine, between two steps.

    Args:
        parts ([`EngineParts`]):
            Of the engine.
    """

    def __init__(self, parts: EngineParts):
        self._llm_engine = parts.llm_engine
        self._requests = require(parts.scheduler, "requests")
        self._states = require(parts.llm_engine, "output_processor.request_states")
        self._can_move: dict[str, bool] = {}

    @property
    def number(self) -> int:
        """How many requests are unfinished."""
        return len(self._states)

    def running(self) -> list[RunningRequest]:
        """All unfinished requests, those that wait to be scheduled included."""
        known, self._can_move = self._can_move, {}
        for internal_id, state in self._states.items():
            is_known = internal_id in known
            self._can_move[internal_id] = (
                known[internal_id] if is_known else can_move(state, self._requests[internal_id])
            )
        return [self._describe(internal_id, state) for internal_id, state in self._states.items()]

    def _describe(self, internal_id: str, state: Any) -> RunningRequest:
        num_tokens = state.detokenizer.num_output_tokens()
        return RunningRequest(
            state.external_req_id,
            state.prompt_token_ids or (),
            num_tokens,
            state.prompt_len + num_tokens,
            self._can_move[internal_id],
        )

    def take_out(self, request_id: str) -> UnfinishedSample:
        """Removes a request from the engine, which forgets it, and returns what it was."""
        internal_id, state = self._find(request_id)
        request = self._requests[internal_id]
        processor = state.logprobs_processor
        sample = UnfinishedSample(
            request_id,
            state.prompt,
            list(state.prompt_token_ids),
            request.sampling_params,
            list(state.detokenizer.output_token_ids),
            None if processor.logprobs is None else list(processor.logprobs),
            processor.cumulative_logprob,
        )
        self._llm_engine.abort_request([internal_id], internal=True)
        return sample

    def drop(self, request_id: str) -> None:
        """Removes a request from the engine."""
        self._llm_engine.abort_request([self._find(request_id)[0]], internal=True)

    def _find(self, request_id: str) -> tuple[str, Any]:
        return next((key, state) for key, state in self._states.items() if state.external_req_id == request_id)

    def go_on(self, request_id: str, sample: UnfinishedSample) -> None:
        """
        Adds a request that goes on with a sample; its outputs hold the new tokens alone.

        The tokens so far are read again as a prompt.
        """
        self._llm_engine.add_request(request_id, {"prompt_token_ids": sample.context_token_ids}, sample.params_left)

    def whole_output(
        self, sample: UnfinishedSample, finish_reason: str | None, stop_reason: int | str | None
    ) -> "RequestOutput":
        """The output of a sample that has run as several requests; it holds all tokens, and the last one ended so."""
        from vllm import CompletionOutput, RequestOutput

        text = self._text(sample) if sample.params.detokenize else ""
        output = CompletionOutput(
            index=0,
            text=text,
            token_ids=sample.token_ids,
            cumulative_logprob=sample.cumulative_logprob,
            logprobs=sample.logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
        return RequestOutput(
            sample.request_id,
            sample.prompt,
            sample.prompt_token_ids,
            prompt_logprobs=None,
            outputs=[output],
            finished=True,
        )

    def _text(self, sample: UnfinishedSample) -> str:
        # Behind its prompt, because a tokenizer may drop a space at the beginning of a text.
        decode, skip = self._llm_engine.get_tokenizer().decode, sample.params.skip_special_tokens
        prompt = decode(sample.prompt_token_ids, skip_special_tokens=skip)
        return decode(sample.context_token_ids, skip_special_tokens=skip)[len(prompt) :]


def can_move(state: Any, request: Any) -> bool:
    """Whether a request can go on elsewhere and follow the same distribution."""
    from vllm import SamplingParams

    is_plain = state.parent_req is None and state.lora_request is None and state.prompt_token_ids is not None
    if not is_plain or request.mm_features or state.prompt_embeds is not None:
        return False
    # Names that begin with an underscore are what vLLM has derived from the others.
    names = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]
    fixed = attrgetter(*(name for name in names if name not in PARAMETERS_THAT_MOVE))
    return fixed(request.sampling_params) == fixed(SamplingParams())
