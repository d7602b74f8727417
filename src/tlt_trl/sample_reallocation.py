"""Unfinished samples move from ranks that end late to ranks that end early: planner, protocol and engine together."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate import Accelerator
from torch.distributed import Store

from .generation.engine import EngineStep
from .generation.rollout_loop import RolloutLoop
from .generation.speculative_generation import SpeculativeVLLMGeneration
from .idle.exchange import Mailbox, Rounds
from .idle.handover import Arrived, Event, Handover, Withdrawn
from .idle.reallocation import (
    LengthSurvival,
    Move,
    RankState,
    RunningSample,
    StepTimes,
    describe_rank,
    horizons,
    in_order_of_moving,
)
from .telemetry.timeline import GUESTS, NoTimeline, Timeline
from .tlt_grpo_config import TLTGRPOConfig
from .upstream import default_store
from .vllm_internals.unfinished import RunningRequest, UnfinishedSample


if TYPE_CHECKING:
    from vllm import RequestOutput


logger = logging.getLogger(__name__)

# Time between two rounds, and what every rank adds to it: the store is asked equally often however many there are.
INTERVAL_S, INTERVAL_PER_RANK_S = 0.25, 0.002
# How often deadlines of the protocol are looked at.
TICK_S = 0.5
REST_S = 0.005


@dataclass(frozen=True, slots=True)
class Ended:
    """A guest that goes home finished."""

    sample: UnfinishedSample
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class _Part:
    """A request that goes on with a sample: a guest, or an own one that was elsewhere."""

    owner: int
    key: str
    sample: UnfinishedSample


class SampleReallocation:
    """
    Moves samples between this rank's engine and those of others; the [`SampleMover`] of a [`RolloutLoop`].

    A rank owns its prompts: a sample that has run elsewhere comes back to it and stands in its place among the
    results, with all tokens and log-probs. Samples that cannot go on elsewhere and follow the same distribution stay.

    Args:
        loop ([`RolloutLoop`]):
            Of this rank.
        store (`torch.distributed.Store`):
            Store of the running process group.
        rank, world_size (`int`):
            This rank, and how many there are.
        max_tokens (`int`):
            Largest number of tokens of an answer.
        timeline ([`Timeline`], *optional*):
            Where the time in which guests run is noted.
    """

    def __init__(
        self,
        loop: RolloutLoop,
        store: Store,
        rank: int,
        world_size: int,
        max_tokens: int,
        timeline: Timeline | NoTimeline | None = None,
    ):
        self.rank = rank
        self._world_size = world_size
        self._loop = loop
        self._requests = loop.engine.requests
        self._points = horizons(max_tokens)
        self._mailbox = Mailbox(store, rank)
        self._handover = Handover(rank, self._mailbox.send)
        interval_s = INTERVAL_S + INTERVAL_PER_RANK_S * world_size
        self._rounds = Rounds(store, rank, world_size, self._points, interval_s)
        self._survival = LengthSurvival(max_tokens)
        self._step_times = StepTimes()
        self._timeline = NoTimeline() if timeline is None else timeline
        self._version = 0
        self._parts: dict[str, _Part] = {}  # by the name of their request
        self._groups: dict[str, int] = {}
        self._num_parts = 0
        self._ticked_s = 0.0
        self._sums = dict.fromkeys(("samples", "tokens", "returned", "predicted_gain_s", "time_s", "guests_s"), 0.0)
        self._bytes_counted = 0

    # ---- a rollout -------------------------------------------------------------------------------------------------

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """
        Around a rollout and the wait for the last rank. Every rank must enter it, once for each sync of the weights.
        """
        self._version += 1
        self._handover.start(self._version)
        self._survival.start_rollout()
        self._groups.clear()
        self._parts.clear()
        self._loop.mover = self
        self._mailbox.start()
        self._rounds.start()
        try:
            yield
        finally:
            self._loop.mover = None
            for request_id in self._parts:  # called back by an owner who has given this rank up
                self._requests.drop(request_id)
            self._parts.clear()
            self._rounds.stop()
            self._mailbox.stop()

    @property
    def holds_back(self) -> bool:
        return bool(self._handover.away)

    def between_steps(self) -> list["RequestOutput"]:
        now_s = time.perf_counter()
        events: list[Event] = []
        for message in self._mailbox.take():
            events += self._handover.receive(message, now_s)
        if now_s - self._ticked_s >= TICK_S:
            self._ticked_s = now_s
            events += self._handover.tick(now_s)
        finished = [output for event in events for output in self._act_on(event, now_s)]
        for move in self._rounds.take_moves():
            self._send(move, now_s)
        # What is on its way would be counted twice, or not at all.
        if self._rounds.is_due and not self._handover.is_sending:
            self._rounds.describe(self._describe().row())
        self._sums["time_s"] += time.perf_counter() - now_s
        return finished

    def keep_own(self, finished: list["RequestOutput"]) -> list["RequestOutput"]:
        own = []
        for output in finished:
            part = self._parts.pop(output.request_id, None)
            if part is None:
                self._note_length(output.prompt_token_ids, len(output.outputs[0].token_ids))
                own.append(output)
                continue
            (last,) = output.outputs
            logprobs = None if last.logprobs is None else list(last.logprobs)
            whole = part.sample.followed_by(list(last.token_ids), logprobs, last.cumulative_logprob)
            self._note_length(whole.prompt_token_ids, len(whole.token_ids))
            if part.owner == self.rank:
                own.append(self._requests.whole_output(whole, last.finish_reason, last.stop_reason))
            else:
                ended = Ended(whole, last.finish_reason, last.stop_reason)
                self._handover.finish(part.owner, part.key, ended, time.perf_counter())
        return own

    def observe(self, step: EngineStep) -> None:
        if not step.has_prefill and step.emitted_tokens:
            self._step_times.observe(step.batch_size, step.seconds * step.batch_size / step.emitted_tokens)

    def rest(self) -> None:
        self._mailbox.has_mail.wait(REST_S)

    def abort(self) -> None:
        now_s = time.perf_counter()
        for owner, key in self._handover.guests:
            part = next(part for part in self._parts.values() if (part.owner, part.key) == (owner, key))
            # As it came: what the engine has made of it may be what it failed on.
            self._handover.give_back(owner, key, part.sample, f"the rollout of rank {self.rank} has failed", now_s)
        self._handover.recall_all()
        self._parts.clear()

    # ---- the wait for the last rank --------------------------------------------------------------------------------

    def stand_by(self) -> None:
        """The rollout of this rank is over: from now on the others may send it samples."""
        self._rounds.leave(RankState.idle(self._loop.engine.max_num_seqs, self._step_times.fit()).row())

    def has_work(self) -> bool:
        """Whether something has come; never blocks."""
        return self._mailbox.has_mail.is_set()

    def serve(self) -> None:
        """Runs the samples that have come, until they have gone home."""
        started_s = time.perf_counter()
        with self._timeline.interval(GUESTS):
            self.between_steps()
            self._rounds.resume()
            self._loop.serve()
        self.stand_by()
        self._sums["guests_s"] += time.perf_counter() - started_s

    # ---- moving ----------------------------------------------------------------------------------------------------

    def _act_on(self, event: Event, now_s: float) -> list["RequestOutput"]:
        if isinstance(event, Arrived):
            self._take_in(event, now_s)
        elif isinstance(event, Withdrawn):
            request_id = next(
                i for i, part in self._parts.items() if (part.owner, part.key) == (event.owner, event.sample)
            )
            del self._parts[request_id]
            self._requests.drop(request_id)
        elif event.is_finished:
            ended: Ended = event.body
            self._note_length(ended.sample.prompt_token_ids, len(ended.sample.token_ids))
            return [self._requests.whole_output(ended.sample, ended.finish_reason, ended.stop_reason)]
        else:
            self._sums["returned"] += 1
            self._go_on(_Part(self.rank, event.sample, event.body))
        return []

    def _take_in(self, guest: Arrived, now_s: float) -> None:
        sample: UnfinishedSample = guest.body
        length = len(sample.context_token_ids)
        if length >= self._loop.engine.max_model_len:
            reason = f"{length} tokens do not fit into the context of rank {self.rank}"
            self._handover.give_back(guest.owner, guest.sample, sample, reason, now_s)
        elif self._requests.number >= self._loop.engine.max_num_seqs:
            self._handover.give_back(guest.owner, guest.sample, sample, f"rank {self.rank} is full", now_s)
        else:
            self._go_on(_Part(guest.owner, guest.sample, sample))

    def _go_on(self, part: _Part) -> None:
        self._num_parts += 1
        request_id = f"{part.owner}/{part.key}/{self._num_parts}"
        self._parts[request_id] = part
        self._requests.go_on(request_id, part.sample)

    def _send(self, move: Move, now_s: float) -> None:
        if move.receiver in self._handover.lost:
            return
        order, _ = in_order_of_moving(self._samples(), self._survival, self._points)
        self._sums["predicted_gain_s"] += move.gain_s if order else 0.0
        for running in order[: move.samples]:
            sample = self._requests.take_out(running.key)
            part = self._parts.pop(running.key, None)
            if part is not None:
                sample = part.sample.followed_by(sample.token_ids, sample.logprobs, sample.cumulative_logprob)
            self._sums["samples"] += 1
            self._sums["tokens"] += len(sample.token_ids)
            self._handover.send_away(sample.request_id, sample, move.receiver, now_s)

    def _describe(self) -> RankState:
        step_time = self._step_times.fit()
        # A token of a prefill costs what one more sample costs in a step.
        per_token_s = 0.0 if step_time is None else step_time.per_sample_s
        seats = self._loop.engine.max_num_seqs
        return describe_rank(self._samples(), self._survival, step_time, seats, self._points, per_token_s)

    def _samples(self) -> list[RunningSample]:
        return [self._sample(request) for request in self._requests.running()]

    def _sample(self, request: RunningRequest) -> RunningSample:
        part = self._parts.get(request.request_id)
        earlier = 0 if part is None else len(part.sample.token_ids)
        prompt = request.prompt_token_ids if part is None else part.sample.prompt_token_ids
        if request.request_id not in self._groups:
            self._groups[request.request_id] = hash(tuple(prompt))
        return RunningSample(
            request.request_id,
            self._groups[request.request_id],
            earlier + request.num_tokens,
            request.num_context_tokens,
            request.can_move and (part is None or part.owner == self.rank),
        )

    def _note_length(self, prompt_token_ids: list[int] | None, length: int) -> None:
        self._survival.observe(length, hash(tuple(prompt_token_ids or ())))

    # ---- what it did -----------------------------------------------------------------------------------------------

    def pop_metrics(self, sum_over_ranks: Callable[[dict[str, float]], dict[str, float]]) -> dict[str, float]:
        """Metrics of all ranks since the last call: times are means over ranks, the rest are sums."""
        own = self._sums | {"bytes": float(self._mailbox.bytes_sent - self._bytes_counted)}
        self._bytes_counted = self._mailbox.bytes_sent
        self._sums = dict.fromkeys(self._sums, 0.0)
        total = sum_over_ranks(own)
        for name in ("time_s", "guests_s"):
            total[name] /= self._world_size
        return {f"tlt/reallocation/{name}": value for name, value in total.items()}


class NoReallocation:
    """Stands in for a [`SampleReallocation`] where no sample moves."""

    def rollout(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pop_metrics(self, sum_over_ranks: Callable[[dict[str, float]], dict[str, float]]) -> dict[str, float]:
        return {}


def reallocation_for(
    args: TLTGRPOConfig, accelerator: Accelerator, generation: SpeculativeVLLMGeneration, has_turns: bool
) -> SampleReallocation | NoReallocation:
    """
    What moves the samples of a run.

    Args:
        args ([`TLTGRPOConfig`]):
            Configuration of the run.
        accelerator ([`~accelerate.Accelerator`]):
            Of the run.
        generation ([`SpeculativeVLLMGeneration`]):
            Has the rollout loop and the timeline.
        has_turns (`bool`):
            Whether a rollout may call the engine several times: tools, environments, a `rollout_func`.

    Raises:
        `ValueError`: If `sample_reallocation="prefill"` cannot be used in this run; the message says why.
    """
    if args.sample_reallocation == "off":
        return NoReallocation()
    obstacle = _obstacle(args, accelerator.num_processes, has_turns)
    if obstacle is None:
        rank, num_ranks = accelerator.process_index, accelerator.num_processes
        max_tokens = args.max_completion_length
        return SampleReallocation(
            generation.rollout_loop, default_store(), rank, num_ranks, max_tokens, generation.timeline
        )
    if args.sample_reallocation == "prefill":
        raise ValueError(f"`sample_reallocation='prefill'` cannot be used {obstacle}. Use 'auto' or 'off'.")
    logger.info("Samples are not reallocated: that cannot be done %s.", obstacle)
    return NoReallocation()


def _obstacle(args: TLTGRPOConfig, num_ranks: int, has_turns: bool) -> str | None:
    obstacles = {
        "with a single process": num_ranks == 1,
        "with `vllm_tensor_parallel_size` above 1": args.vllm_tensor_parallel_size > 1,
        "with `vllm_enable_sleep_mode`, since an engine that sleeps takes nothing in": args.vllm_enable_sleep_mode,
        "with `drafter_training=False`, since ranks take samples in while their drafters train": (
            not args.drafter_training
        ),
        "with tools, environments or a `rollout_func`, which call the engine more than once": has_turns,
    }
    return next((text for text, applies in obstacles.items() if applies), None)
