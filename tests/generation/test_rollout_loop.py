from collections import deque
from types import SimpleNamespace

import pytest

from tlt_trl.generation.engine import DraftLengthSchedule, EngineStep, RolloutEngine
from tlt_trl.generation.rollout_loop import RolloutLoop
from tlt_trl.strategy import Strategy


def step(batch_size, verified, proposed, accepted=(), prefill=False, seconds=0.01):
    return EngineStep(
        batch_size=batch_size,
        num_verified=verified,
        num_proposed=proposed,
        drafts=batch_size if verified else 0,
        draft_tokens=batch_size * verified,
        drafted_by_position=(batch_size,) * verified,
        accepted_by_position=tuple(accepted),
        emitted_tokens=batch_size + sum(accepted),
        context_tokens=100 * batch_size,
        has_prefill=prefill,
        seconds=seconds,
    )


class ScriptedEngine:
    """Plays back engine steps; asks its schedule as the scheduler does."""

    def __init__(self, steps, finished_at):
        self.schedule = DraftLengthSchedule(5)
        self.steps, self.finished_at, self.now = steps, finished_at, 0
        self.asked, self.probabilistic = [], []
        self.num_lookup_tokens, self.looked_up = 0, []

    def has_unfinished_requests(self):
        return self.now < len(self.steps)

    def set_probabilistic_drafts(self, probabilistic):
        self.probabilistic.append(probabilistic)

    def step(self):
        self.asked.append(self.schedule[self.steps[self.now].batch_size])
        self.looked_up.append(self.num_lookup_tokens)
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


class RecordingNgramDrafter:
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
    loop.ngram = RecordingNgramDrafter()
    return loop, loop.run()


def test_outputs_come_in_the_order_of_the_requests():
    steps = [step(2, 2, 2, (1, 0))] * 3
    _, outputs = run(steps, {"10": 0, "9": 2})
    assert [output.request_id for output in outputs] == ["9", "10"]


def test_only_steady_steps_teach_the_selector():
    steps = [
        step(2, 0, 2, prefill=True),  # prompts
        step(2, 2, 2, (2, 1)),
        step(1, 2, 0, (1, 1)),  # the strategy changes to off: its drafts were paid for by the step before
        step(1, 0, 0),
    ]
    loop, _ = run(steps, choose=lambda batch_size: Strategy("eagle3", 2) if batch_size > 1 else Strategy.off())
    assert loop.selector.updates == [
        ("eagle3 x2", 2, 5, 0.01, 200, (2, 1)),
        ("off", 1, 1, 0.01, 100, ()),
    ]
    assert loop.engine.asked == [2, 2, 0, 0]


def test_context_of_the_last_step_reaches_the_selector():
    loop, _ = run([step(2, 2, 2, (1, 0)), step(1, 2, 2, (1, 0))])
    assert loop.selector.selects == [(2, 0), (1, 200)]


def test_statistics_add_up():
    loop, _ = run([step(2, 0, 2, prefill=True), step(2, 2, 2, (2, 1)), step(1, 2, 2, (1, 0))])
    stats = loop.pop_stats()
    assert (stats.steps, stats.speculative_steps) == (3, 2)
    assert (stats.drafts, stats.draft_tokens, stats.accepted_by_position) == (3, 6, [3, 1])
    assert stats.emitted_tokens == 2 + 5 + 2
    assert stats.acceptance_length == pytest.approx(1 + 4 / 3)
    assert stats.acceptance_by_position == pytest.approx([1.0, 1 / 3])
    assert stats.tokens_per_s == pytest.approx(9 / 0.03)
    assert loop.pop_stats().steps == 0


def test_draft_sampling_is_switched_with_the_strategy():
    loop, _ = run([step(1, 1, 1, (1,))] * 2, choose=lambda batch_size: Strategy("eagle3", 1, "probabilistic"))
    assert loop.engine.probabilistic == [True, True]


@pytest.mark.parametrize("asked", [-1, 6])
def test_length_outside_the_engine_is_an_error(asked):
    schedule = DraftLengthSchedule(5)
    schedule.choose = lambda batch_size: asked
    with pytest.raises(ValueError, match="0 to 5"):
        schedule[3]


def test_lookup_asks_the_drafter_for_nothing_and_learns_from_what_was_found():
    def choose(batch_size):
        return Strategy("ngram", 3) if batch_size == 2 else Strategy("eagle3", 2)

    steps = [step(2, 0, 3, prefill=True), step(2, 2, 3, (2, 1)), step(2, 0, 3), step(1, 2, 2, (1, 0))]
    loop, _ = run(steps, choose=choose)
    assert loop.engine.asked == [0, 0, 0, 2]
    assert loop.engine.looked_up == [3, 3, 3, 0]
    # Fewer tokens than asked for were found, or none at all: that is what the strategy is worth.
    assert loop.selector.updates == [
        ("ngram x3", 2, 5, 0.01, 200, (2, 1, 0)),
        ("ngram x3", 2, 2, 0.01, 200, (0, 0, 0)),
    ]
    # The tokens of a step are those that the one before it asked for.
    stats = loop.pop_stats()
    assert (stats.lookups, stats.lookup_tokens, stats.accepted_lookup_tokens) == (3, 6, 4)
    assert stats.drafts == stats.draft_tokens == 0 and stats.speculative_steps == 2


def test_finished_answers_reach_the_lookup():
    loop, _ = run([step(2, 0, 2, prefill=True), step(2, 2, 2, (1, 0))], {"10": 0, "9": 1})
    assert loop.engine.ngram is loop.ngram and loop.ngram.rollouts == 1
    assert loop.ngram.remembered == [([1, 2], [7, 10]), ([1, 2], [7, 9])]


def test_a_draft_cut_short_teaches_nothing():
    loop, _ = run([step(1, 0, 2, prefill=True), step(1, 1, 2, (1,))])
    assert loop.selector.updates == []


def test_strategies_of_an_asynchronous_scheduler_belong_to_their_steps():
    steps = [step(2, 0, 2, prefill=True), step(2, 2, 2, (1, 0)), step(2, 2, 0, (1, 1)), step(2, 0, 0)]
    choices = iter([Strategy("eagle3", 2), Strategy("eagle3", 2), Strategy.off(), Strategy.off(), Strategy.off()])
    engine = ScriptedEngine(steps, {"0": 3})
    loop = RolloutLoop(engine, RecordingSelector(lambda batch_size: next(choices)))
    play = engine.step

    def ahead():  # schedules a step before it hands out the one before
        if engine.now == 0:
            engine.schedule[2]
        return play()

    engine.step = ahead
    loop.run()
    assert [update[0] for update in loop.selector.updates] == ["eagle3 x2", "off"]


def test_a_step_still_under_way_counts_as_unfinished():
    engine = object.__new__(RolloutEngine)
    engine._llm_engine = SimpleNamespace(has_unfinished_requests=lambda: False)
    engine._core = SimpleNamespace(batch_queue=deque(["a step that an asynchronous scheduler has run ahead"]))
    assert engine.has_unfinished_requests()
    engine._core.batch_queue.clear()
    assert not engine.has_unfinished_requests()
    engine._core.batch_queue = None  # a synchronous scheduler has none
    assert not engine.has_unfinished_requests()
