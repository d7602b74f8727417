"""vLLM's scheduler: who decides how a step speculates, and what the step did."""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..strategy.strategy import Strategy
from .contract import replace


@dataclass(frozen=True, slots=True)
class EngineStep:
    """
    What one engine step did.

    A step verifies the draft tokens that the step before it proposed, and proposes those of the next one; the two
    strategies differ in the step in which the choice changes.

    Attributes:
        batch_size (`int`):
            Requests that ran in this step.
        verified ([`~tlt_trl.strategy.Strategy`]):
            Strategy that had proposed the draft tokens of this step; "off" in the first step of a rollout.
        proposed ([`~tlt_trl.strategy.Strategy`]):
            Strategy chosen for this step, which proposes the draft tokens of the next one.
        num_verified (`int`):
            Draft tokens per request that this step verified (the largest over its requests).
        drafts (`int`):
            Requests that had draft tokens verified.
        draft_tokens (`int`):
            Draft tokens verified, summed over requests.
        drafted_by_position (`tuple[int, ...]`):
            Number of requests that had a draft token at that position, one entry per position.
        accepted_by_position (`tuple[int, ...]`):
            Number of requests whose draft token at that position was accepted, one entry per position.
        emitted_tokens (`int`):
            Completion tokens: accepted draft tokens plus one for each request that sampled, without what lies behind
            the end of an answer.
        context_tokens (`int`):
            Tokens in the KV cache of the requests of this step before it ran.
        has_prefill (`bool`):
            Whether a request was in its prompt (such a step costs more and tells nothing about decoding).
        seconds (`float`):
            Wall-clock time of the step.
    """

    batch_size: int
    verified: Strategy
    proposed: Strategy
    num_verified: int
    drafts: int
    draft_tokens: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    emitted_tokens: int
    context_tokens: int
    has_prefill: bool
    seconds: float


class SteeredScheduler:
    """
    Lets a caller choose the strategy of every step and tells what the step did.

    It stands in for vLLM's `dynamic_sd_lookup` list, which the scheduler indexes by batch size in every step. Being
    asked by the scheduler itself, at the moment it knows the batch of this very step, is what makes the choice exact:
    a table written before the step has to guess which waiting requests the step will admit.

    Args:
        scheduler:
            vLLM's scheduler.
        max_draft_tokens (`int`):
            Draft tokens that the engine was built for; 0 for a plain engine, which is only observed.
        can_look_up (`bool`):
            Whether looked-up tokens can take the place of the drafter's.
        on_choice (`Callable[[Strategy], None]`):
            Told of every choice before the step runs.
    """

    def __init__(
        self, scheduler: Any, max_draft_tokens: int, can_look_up: bool, on_choice: Callable[[Strategy], None]
    ):
        self.max_draft_tokens = max_draft_tokens
        self.can_look_up = can_look_up
        # Strategy for a number of running requests.
        self.choose: Callable[[int], Strategy] = lambda batch_size: Strategy("eagle3", max_draft_tokens)
        # Draft tokens for (request id, prompt, answer, number of tokens wanted).
        self.look_up: Callable[[str, Sequence[int], Sequence[int], int], list[int]] = lambda *request: []
        # Whether a request with these `SamplingParams` is exact under speculation.
        self.is_exact: Callable[[Any], bool] = lambda params: True
        # Told of the `SamplingParams` of every request.
        self.on_request: Callable[[Any], None] = lambda params: None
        self._inexact_requests: set[str] = set()
        self._scheduler = scheduler
        self._on_choice = on_choice
        # Choices for steps that are scheduled and not yet observed: an asynchronous scheduler runs ahead.
        self._chosen: deque[Strategy] = deque()
        self._proposed = Strategy.off()  # by the step observed last
        self._step: EngineStep | None = None
        self._update_from_output = replace(scheduler, "update_from_output", self._observe)
        if max_draft_tokens:
            replace(scheduler, "dynamic_sd_lookup", self)
            self._add_request = replace(scheduler, "add_request", self._check_and_add)
        if can_look_up:
            self._update_draft_token_ids = replace(scheduler, "update_draft_token_ids", self._hand_over_draft_tokens)

    def __getitem__(self, batch_size: int) -> int:
        """Asked by the scheduler: draft tokens that the drafter shall propose in the step being scheduled."""
        strategy = Strategy.off() if self._runs_inexact_request() else self.choose(batch_size)
        if strategy.num_draft_tokens > self.max_draft_tokens:
            raise ValueError(
                f"The strategy {strategy} asks for more than the {self.max_draft_tokens} draft tokens that the engine "
                "was built for. Add it to `speculation_strategies` before the trainer is built, or do not choose it."
            )
        if strategy.method == "ngram" and not self.can_look_up:
            raise ValueError(
                f"The strategy {strategy} cannot be used: this engine schedules asynchronously, or its drafter must "
                "run in every step, so draft tokens cannot be looked up."
            )
        self._chosen.append(strategy)
        self._on_choice(strategy)
        return 0 if strategy.method == "ngram" else strategy.num_draft_tokens

    def pop_step(self, seconds: float) -> EngineStep | None:
        """What the step since the last call did; `None` when nothing ran."""
        step, self._step = self._step, None
        return None if step is None else dataclasses.replace(step, seconds=seconds)

    def reset(self) -> None:
        """Forgets choices for steps that will not be observed any more."""
        self._chosen.clear()
        self._proposed = Strategy.off()
        self._step = None

    def _check_and_add(self, request: Any) -> None:
        """Takes the place of `scheduler.add_request`, by which every request comes, whoever has made it."""
        self.on_request(request.sampling_params)
        if not self.is_exact(request.sampling_params):
            self._inexact_requests.add(request.request_id)
        self._add_request(request)

    def _runs_inexact_request(self) -> bool:
        """A step in which one runs proposes nothing, so that it is plain in the next one too."""
        if not self._inexact_requests:
            return False
        self._inexact_requests &= self._scheduler.requests.keys()
        return any(request.request_id in self._inexact_requests for request in self._scheduler.running)

    def _observe(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """
        Takes the place of `scheduler.update_from_output`, where a step's schedule and its sampled tokens meet.

        vLLM's own `SpecDecodingStats` cannot be used: `make_spec_decoding_stats` returns None for a request without
        draft tokens and with it drops what was counted for the requests before it (vLLM 0.31).
        """
        step = self._read_step(scheduler_output, model_runner_output)
        outputs = self._update_from_output(scheduler_output, model_runner_output)
        if step is not None:
            # Not what was sampled: that goes on behind the end of an answer, by as much as was accepted there.
            emitted = sum(len(o.new_token_ids) for of_client in outputs.values() for o in of_client.outputs)
            self._step = dataclasses.replace(step, emitted_tokens=emitted)
        return outputs

    def _read_step(self, scheduler_output: Any, model_runner_output: Any) -> EngineStep | None:
        scheduled = scheduler_output.num_scheduled_tokens
        if not scheduled:
            return None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        drafted, accepted = _counts_by_position(drafts, model_runner_output)
        # Requests that are all new had nothing proposed for them, whatever the last step of the last rollout did.
        verified = self._proposed if scheduler_output.scheduled_cached_reqs.req_ids else Strategy.off()
        self._proposed = self._chosen.popleft() if self.max_draft_tokens else Strategy.off()
        return EngineStep(
            batch_size=len(scheduled),
            verified=verified,
            proposed=self._proposed,
            num_verified=len(drafted),
            drafts=len(drafts),
            draft_tokens=sum(drafted),
            drafted_by_position=drafted,
            accepted_by_position=accepted,
            emitted_tokens=0,
            context_tokens=sum(scheduler_output.scheduled_cached_reqs.num_computed_tokens),
            has_prefill=any(
                num_tokens != 1 + len(drafts.get(request_id, ())) for request_id, num_tokens in scheduled.items()
            ),
            seconds=0.0,
        )

    def _hand_over_draft_tokens(self, draft_token_ids: Any) -> None:
        """
        Takes the place of `scheduler.update_draft_token_ids`, by which the draft tokens of a step reach the next one.

        Where they are to be looked up the drafter was asked for none, and each request gets as many as are found.
        """
        strategy = self._proposed  # of the step just observed: a scheduler that can look up does not run ahead
        if strategy.method == "ngram":
            for row, request_id in enumerate(draft_token_ids.req_ids):
                draft_token_ids.draft_token_ids[row] = self._look_up(request_id, strategy.num_draft_tokens)
        self._update_draft_token_ids(draft_token_ids)

    def _look_up(self, request_id: str, num_draft_tokens: int) -> list[int]:
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished() or request.is_prefill_chunk or request.prompt_token_ids is None:
            return []
        return self.look_up(request_id, request.prompt_token_ids, request._output_token_ids, num_draft_tokens)


def _counts_by_position(
    drafts: dict[str, Sequence[int]], model_runner_output: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Requests that had a draft token, and one that was accepted, at every position."""
    sampled, row = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
    drafted = [0] * max(map(len, drafts.values()), default=0)
    accepted = [0] * len(drafted)
    for request_id, tokens in drafts.items():
        for position in range(len(tokens)):
            drafted[position] += 1
        for position in range(min(len(sampled[row[request_id]]) - 1, len(tokens))):
            accepted[position] += 1
    return tuple(drafted), tuple(accepted)
