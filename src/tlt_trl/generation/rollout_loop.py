"""Steps the engine until every sample is finished; the selector chooses each step and hears what it did."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Protocol

from ..strategy import Selector, StepLedger, Strategy
from .engine import EngineStep, RolloutEngine
from .leader import LeadersChoice
from .lookup import LookupDrafter


if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


@dataclass(slots=True)
class RolloutStats:
    """
    Sums over the engine steps of one or several rollouts; all of them add up across ranks.

    Attributes:
        steps (`int`):
            Engine steps.
        speculative_steps (`int`):
            Steps that verified draft tokens.
        time_s (`float`):
            Wall-clock time spent in engine steps.
        emitted_tokens (`int`):
            Completion tokens sampled.
        drafts (`int`):
            Requests that had draft tokens verified, summed over steps.
        draft_tokens (`int`):
            Draft tokens verified.
        drafted_by_position (`list[int]`):
            Draft tokens verified, by position.
        accepted_by_position (`list[int]`):
            Accepted draft tokens, by position.
        lookups (`int`):
            Requests that had looked-up tokens verified, summed over steps.
        lookup_tokens (`int`):
            Looked-up tokens verified.
        accepted_lookup_tokens (`int`):
            Looked-up tokens that were accepted.

    What the drafter drafted and what was looked up in text are counted apart: good lookups would hide a drafter of
    which nothing is accepted.
    """

    steps: int = 0
    speculative_steps: int = 0
    time_s: float = 0.0
    emitted_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    lookups: int = 0
    lookup_tokens: int = 0
    accepted_lookup_tokens: int = 0

    def add_step(self, step: EngineStep) -> None:
        """Adds a step."""
        self.steps += 1
        self.time_s += step.seconds
        self.emitted_tokens += step.emitted_tokens
        if not step.draft_tokens:
            return
        self.speculative_steps += 1
        if step.verified.method == "ngram":
            self.lookups += step.drafts
            self.lookup_tokens += step.draft_tokens
            self.accepted_lookup_tokens += sum(step.accepted_by_position)
            return
        self.draft_tokens += step.draft_tokens
        self.drafts += step.drafts
        for mine, of_step in (
            (self.drafted_by_position, step.drafted_by_position),
            (self.accepted_by_position, step.accepted_by_position),
        ):
            mine += [0] * (len(of_step) - len(mine))
            for position, count in enumerate(of_step):
                mine[position] += count

    def sums(self, num_positions: int) -> dict[str, float]:
        """All numbers by name, positions counted from 1; `num_positions` is the same on all ranks."""
        by_position = {"drafted": self.drafted_by_position, "accepted": self.accepted_by_position}
        sums = {name: float(value) for name, value in asdict(self).items() if not isinstance(value, list)}
        for name, counts in by_position.items():
            padded = counts + [0] * (num_positions - len(counts))
            sums |= {f"{name}_{position}": float(count) for position, count in enumerate(padded, start=1)}
        return sums

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_position)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verification of the drafter's tokens for one request; 1.0 without drafts."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafter's tokens at each position that was accepted, for the positions that were drafted."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @property
    def tokens_per_s(self) -> float:
        return self.emitted_tokens / self.time_s if self.time_s else 0.0


class SampleMover(Protocol):
    """What moves samples between this engine and those of other ranks, between two steps."""

    @property
    def holds_back(self) -> bool:
        """Whether samples of this rank are elsewhere, so that its rollout is not over."""

    def between_steps(self) -> list["RequestOutput"]:
        """Moves what is to be moved; returns samples of this rank that have ended elsewhere."""

    def keep_own(self, finished: list["RequestOutput"]) -> list["RequestOutput"]:
        """Sends samples of others home and returns those of this rank, whole."""

    def observe(self, step: EngineStep) -> None:
        """Hears what a step did."""

    def rest(self) -> None:
        """Waits a moment for something to come."""

    def abort(self) -> None:
        """The rollout has failed: samples of others go home."""


class RolloutLoop:
    """
    Runs the engine until all requests are finished.

    Args:
        engine ([`RolloutEngine`]):
            Engine with a drafter.
        selector (`Selector`):
            Chooses the [`~tlt_trl.strategy.Strategy`] for a batch size: `select(batch_size, context_tokens)` and
            `update(strategy, batch_size, emitted_tokens, seconds, ...)`.
    """

    def __init__(self, engine: RolloutEngine, selector: Selector):
        self.engine = engine
        self.selector = selector
        self.leaders_choice: LeadersChoice | None = None  # with tensor parallelism
        self.stats = RolloutStats()
        self.disabled: set[str] = set()  # reasons for which speculation is off, whatever the selector says
        self.ledger = StepLedger(selector)
        self.lookup = LookupDrafter()
        self.mover: SampleMover | None = None
        self._looks_up = any(strategy.method == "ngram" for strategy in selector.strategies)
        self._context_tokens = 0
        self.temperatures: Counter[float] = Counter()  # of requests, until somebody clears it
        engine.on_request = self._note_request

    def _note_request(self, params: "SamplingParams") -> None:
        self.temperatures[params.temperature] += 1

    def temperature(self, default: float) -> float:
        """What most requests are sampled at; `default` when there were none."""
        return self.temperatures.most_common(1)[0][0] if self.temperatures else default

    def _choose(self, batch_size: int) -> Strategy:
        if self.leaders_choice is None:
            return self._own_choice(batch_size)
        return self.leaders_choice(batch_size, self._own_choice)

    def _own_choice(self, batch_size: int) -> Strategy:
        return Strategy.off() if self.disabled else self.selector.select(batch_size, self._context_tokens)

    def speculate_while_it_pays(self, pays: bool) -> None:
        """Whether speculation, as a whole, costs less than it saves."""
        (self.disabled.discard if pays else self.disabled.add)("not_paying")

    def run(self) -> list["RequestOutput"]:
        """
        Returns:
            `list[RequestOutput]`: The finished requests in the order in which they were added.
        """
        self.engine.choose = self._choose
        self.engine.lookup = self.lookup
        self.selector.start_rollout()
        if self.leaders_choice is not None:
            self.leaders_choice.start_rollout()
        self.lookup.start_rollout()
        self._context_tokens = 0  # what the last rollout ended with is gone
        return sorted(self._run_until_finished(), key=lambda output: int(output.request_id))

    def serve(self) -> None:
        """Runs samples of others that have come when the rollout of this rank was over, until they have gone home."""
        self._run_until_finished()

    def _run_until_finished(self) -> list["RequestOutput"]:
        finished = []
        try:
            while self._is_unfinished():
                finished += self._step()
        except BaseException:  # an interrupt in a notebook, whose next cell goes on with this engine
            if self.mover is not None:
                self.mover.abort()
            self.engine.abort_unfinished()
            raise
        return finished

    def _is_unfinished(self) -> bool:
        return self.engine.has_unfinished_requests() or (self.mover is not None and self.mover.holds_back)

    def _step(self) -> list["RequestOutput"]:
        """Runs one engine step; returns the requests that have finished in it."""
        finished = [] if self.mover is None else self.mover.between_steps()
        if self.engine.has_unfinished_requests():
            finished += self._engine_step()
        elif self.mover is not None and not finished:
            self.mover.rest()
        for output in finished:
            self._remember(output)
        return finished

    def _engine_step(self) -> list["RequestOutput"]:
        outputs, step = self.engine.step()
        if step is not None:
            self._observe(step)
            if self.mover is not None:
                self.mover.observe(step)
        finished = [output for output in outputs if output.finished]
        return finished if self.mover is None else self.mover.keep_own(finished)

    def _remember(self, output: "RequestOutput") -> None:
        """Lets the lookup see the answer, for the samples of the same prompt that still run or will."""
        if self._looks_up and output.prompt_token_ids:
            for completion in output.outputs:
                self.lookup.remember(output.prompt_token_ids, list(completion.token_ids))

    def _observe(self, step: EngineStep) -> None:
        self.stats.add_step(step)
        self._context_tokens = step.context_tokens
        strategy = step.proposed
        # The tokens of a step come from the drafts of the one before: where the two strategies differ, its seconds and
        # its tokens belong to different choices, and a selector that learnt from it would be misled. A drafter cut
        # short at the end of the context would mislead it too; a lookup finds as many tokens as it finds.
        is_whole = strategy.method == "ngram" or step.num_verified == strategy.num_draft_tokens
        steady = strategy == step.verified and is_whole and not step.has_prefill
        self.ledger.add(strategy, step.batch_size, step.emitted_tokens, step.seconds, step.context_tokens, steady)
        # Evaluations teach it too: a selector that tried something and never heard how it went would stay with it.
        if not self.disabled and steady:
            missing = strategy.num_draft_tokens - step.num_verified
            self.selector.update(
                strategy,
                step.batch_size,
                step.emitted_tokens,
                step.seconds,
                context_tokens=step.context_tokens,
                accepted_by_position=step.accepted_by_position + (0,) * missing,
            )

    def pop_ledger(self) -> StepLedger:
        """Returns the ledger of the steps since the last call and starts a new one."""
        ledger, self.ledger = self.ledger, StepLedger(self.selector)
        return ledger

    def pop_stats(self) -> RolloutStats:
        """Returns the statistics since the last call and starts new ones."""
        stats, self.stats = self.stats, RolloutStats()
        return stats
