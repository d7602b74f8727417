from types import SimpleNamespace

import pytest

from tlt_trl.generation.rollout_loop import RolloutLoop
from tlt_trl.strategy import Strategy
from tlt_trl.vllm_internals.scheduler import EngineStep


OFF, TWO, LOOKUP = Strategy.off(), Strategy("eagle3", 2), Strategy("ngram", 3)


def step(batch_size, verified, proposed, accepted=(), prefill=False, seconds=0.01, num_verified=None):
    num_verified = verified.num_draft_tokens if num_verified is None else num_verified
    return EngineStep(
        batch_size=batch_size,
        verified=verified,
        proposed=proposed,
        num_verified=num_verified,
        drafts=batch_size if num_verified else 0,
        draft_tokens=batch_size * num_verified,
        drafted_by_position=(batch_size,) * num_verified,
        accepted_by_position=tuple(accepted),
        emitted_tokens=batch_size + sum(accepted),
        context_tokens=100 * batch_size,
        has_prefill=prefill,
        seconds=seconds,
    )


class ScriptedEngine:
    """Plays back engine steps; asks for a strategy as the scheduler does."""

    def __init__(self, steps, finished_at):
        self.choose, self.lookup = None, None
        self.steps, self.finished_at, self.now = steps, finished_at, 0
        self.chosen = []

    def has_unfinished_requests(self):
        return self.now < len(self.steps)

    def step(self):
        self.chosen.append(self.choose(self.steps[self.now].batch_size))
        outputs = [
            SimpleNamespace(
                request_id=request,
                finished=True,
                prompt_token_ids=[1, 2],
                outputs=[SimpleNamespace(token_ids=(7, int(request)))],
            )
            for request, when in self.finished_at.items()
            if when == self.now
        ]
        self.now += 1
        return outputs, self.steps[self.now - 1]


class RecordingLookup:
    def __init__(self):
        self.rollouts, self.remembered = 0, []

    def start_rollout(self):
        self.rollouts += 1

    def remember(self, prompt, answer):
        self.remembered.append((prompt, answer))


class RecordingSelector:
    strategies = [
        Strategy.off(),
        Strategy("eagle3", 1, "probabilistic"),
        Strategy("eagle3", 2),
        Strategy("eagle3", 3),
        Strategy("ngram", 3),
    ]

    def __init__(self, choose):
        self.choose, self.updates, self.rollouts, self.selects = choose, [], 0, []

    def start_rollout(self):
        self.rollouts += 1

    def select(self, batch_size, context_tokens=0):
        self.selects.append((batch_size, context_tokens))
        return self.choose(batch_size)

    def update(self, strategy, batch_size, emitted_tokens, seconds, context_tokens=0, accepted_by_position=None):
        self.updates.append((str(strategy), batch_size, emitted_tokens, seconds, context_tokens, accepted_by_position))


def run(steps, finished_at=None, choose=lambda batch_size: Strategy("eagle3", 2)):
    engine = ScriptedEngine(steps, finished_at or {"0": len(steps) - 1})
    loop = RolloutLoop(engine, RecordingSelector(choose))
    loop.lookup = RecordingLookup()
    return loop, loop.run()


def test_outputs_come_in_the_order_of_the_requests():
    steps = [step(2, TWO, TWO, (1, 0))] * 3
    _, outputs = run(steps, {"10": 0, "9": 2})
    assert [output.request_id for output in outputs] == ["9", "10"]


def test_only_steady_steps_teach_the_selector():
    steps = [
        step(2, OFF, TWO, prefill=True),  # prompts
        step(2, TWO, TWO, (2, 1)),
        step(1, TWO, OFF, (1, 1)),  # the strategy changes to off: its drafts were paid for by the step before
        step(1, OFF, OFF),
    ]
    loop, _ = run(steps, choose=lambda batch_size: Strategy("eagle3", 2) if batch_size > 1 else Strategy.off())
    assert loop.selector.updates == [
        ("eagle3 x2", 2, 5, 0.01, 200, (2, 1)),
        ("off", 1, 1, 0.01, 100, ()),
    ]
    assert loop.engine.chosen == [TWO, TWO, OFF, OFF]


def test_context_of_the_last_step_reaches_the_selector():
    loop, _ = run([step(2, TWO, TWO, (1, 0)), step(1, TWO, TWO, (1, 0))])
    assert loop.selector.selects == [(2, 0), (1, 200)]


def test_statistics_add_up():
    loop, _ = run([step(2, OFF, TWO, prefill=True), step(2, TWO, TWO, (2, 1)), step(1, TWO, TWO, (1, 0))])
    stats = loop.pop_stats()
    assert (stats.steps, stats.speculative_steps) == (3, 2)
    assert (stats.drafts, stats.draft_tokens, stats.accepted_by_position) == (3, 6, [3, 1])
    assert stats.emitted_tokens == 2 + 5 + 2
    assert stats.acceptance_length == pytest.approx(1 + 4 / 3)
    assert stats.acceptance_by_position == pytest.approx([1.0, 1 / 3])
    assert stats.tokens_per_s == pytest.approx(9 / 0.03)
    assert loop.pop_stats().steps == 0


def test_a_lookup_teaches_what_was_found():
    steps = [
        step(2, OFF, LOOKUP, prefill=True),
        step(2, LOOKUP, LOOKUP, (2, 1), num_verified=2),
        step(2, LOOKUP, LOOKUP, num_verified=0),
        step(1, LOOKUP, TWO, (1, 0), num_verified=2),
    ]
    loop, _ = run(steps, choose=lambda batch_size: LOOKUP if batch_size == 2 else TWO)
    # Fewer tokens than asked for were found, or none at all: that is what the strategy is worth.
    assert loop.selector.updates == [
        ("ngram x3", 2, 5, 0.01, 200, (2, 1, 0)),
        ("ngram x3", 2, 2, 0.01, 200, (0, 0, 0)),
    ]
    stats = loop.pop_stats()
    assert (stats.lookups, stats.lookup_tokens, stats.accepted_lookup_tokens) == (3, 6, 4)
    assert stats.drafts == stats.draft_tokens == 0 and stats.speculative_steps == 2


def test_finished_answers_reach_the_lookup():
    loop, _ = run([step(2, OFF, TWO, prefill=True), step(2, TWO, TWO, (1, 0))], {"10": 0, "9": 1})
    assert loop.engine.lookup is loop.lookup and loop.lookup.rollouts == 1
    assert loop.lookup.remembered == [([1, 2], [7, 10]), ([1, 2], [7, 9])]


def test_a_draft_cut_short_teaches_nothing():
    loop, _ = run([step(1, OFF, TWO, prefill=True), step(1, TWO, TWO, (1,), num_verified=1)])
    assert loop.selector.updates == []


def test_a_disabled_loop_decodes_plainly_and_teaches_nothing():
    engine = ScriptedEngine([step(1, OFF, OFF)] * 2, {"0": 1})
    loop = RolloutLoop(engine, RecordingSelector(lambda batch_size: TWO))
    loop.disabled.add("inexact")
    loop.run()
    assert engine.chosen == [OFF, OFF]
    assert loop.selector.updates == loop.selector.selects == []
