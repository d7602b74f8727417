import json
import random

import pytest

from tlt_trl.strategy import Strategy, make_selector
from tlt_trl.strategy.selector import Selector, SlidingMedian


STRATEGIES = [Strategy.off(), Strategy("eagle3", 1), Strategy("eagle3", 3), Strategy("ngram", 4)]
ADAPTIVE = ["beg_mab", "cost_model", "auto"]


def run(selector, steps, rng, positions=True):
    """Feeds random but plausible steps; returns what was chosen."""
    chosen = []
    for step in range(steps):
        if step % 50 == 0:
            selector.start_rollout()
        batch = rng.choice((1, 2, 3, 5, 8))
        strategy = selector.select(batch, 10 * step)
        by_position, reached = [], batch
        for _ in range(strategy.num_draft_tokens):
            reached = sum(rng.random() < 0.8 for _ in range(reached))
            by_position.append(reached)
        seconds = (0.01 + 0.001 * strategy.num_draft_tokens) * rng.uniform(0.9, 1.1)
        accepted = by_position if positions else None
        selector.update(strategy, batch, batch + sum(by_position), seconds, 10 * step, accepted)
        chosen.append(strategy)
    return chosen


def test_sliding_median_equals_its_reference():
    rng = random.Random(0)
    median, values = SlidingMedian(7), []
    for _ in range(300):
        values.append(float(rng.randrange(10)))  # many equal values
        median.append(values[-1])
        last = sorted(values[-7:])
        assert median.median() == last[(len(last) - 1) // 2]
        assert median.values() == values[-7:]


class Alternating(Selector):
    """Chooses the next arm at every decision."""

    calls = 0

    def _choose(self, bucket, batch_size, context_tokens):
        self.calls += 1
        return self.calls % 2


def test_choice_is_held_within_a_bucket_and_dropped_when_it_changes():
    selector = Alternating(STRATEGIES[:2], [1, 2, 4, 8], random.Random(0), min_dwell_steps=3)
    arms = [selector.select(batch).num_draft_tokens for batch in (8, 7, 5, 6, 6, 4, 4, 3, 3)]
    #      three steps of bucket 5..8 | two of the next choice | bucket 3..4, three steps, then the next choice
    assert arms == [1, 1, 1, 0, 0, 1, 1, 1, 0]
    selector.start_rollout()
    assert selector.select(3).num_draft_tokens == 1


@pytest.mark.parametrize("name", ADAPTIVE)
@pytest.mark.parametrize("positions", [True, False])
def test_state_round_trip_continues_the_same(name, positions):
    first = make_selector(name, STRATEGIES, 8, seed=3)
    rng = random.Random(7)
    run(first, 333, rng, positions)
    state = json.loads(json.dumps(first.state_dict()))  # must survive a checkpoint

    second = make_selector(name, STRATEGIES, 8, seed=99)
    second.load_state_dict(state)
    assert second.state_dict() == first.state_dict()
    assert second.summary() == first.summary()
    rng_state = rng.getstate()
    tail = run(first, 333, rng, positions)
    rng.setstate(rng_state)
    assert run(second, 333, rng, positions) == tail
    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize("name", ADAPTIVE)
def test_same_seed_same_choices(name):
    chosen = [run(make_selector(name, STRATEGIES, 8, seed=1), 500, random.Random(5)) for _ in range(2)]
    assert chosen[0] == chosen[1]


def test_state_of_other_strategies_or_buckets_is_refused():
    state = make_selector("auto", STRATEGIES, 8, 0).state_dict()
    with pytest.raises(ValueError, match="strategies="):
        make_selector("auto", STRATEGIES[:2], 8, 0).load_state_dict(state)
    with pytest.raises(ValueError, match="bucket_edges="):
        make_selector("auto", STRATEGIES, 16, 0).load_state_dict(state)


@pytest.mark.parametrize("name", ADAPTIVE)
def test_summary_has_one_row_per_bucket_and_strategy(name):
    selector = make_selector(name, STRATEGIES, 8, 0)
    run(selector, 400, random.Random(0))
    rows = selector.summary()
    assert len(rows) == 4 * len(STRATEGIES)
    assert sum(row["visits"] for row in rows) == 400
    assert [row["bucket_low"] for row in rows[:: len(STRATEGIES)]] == [1, 2, 3, 5]
    for row in rows:
        assert row["visits"] == 0 or row["tokens_per_s"] == row["emitted_tokens"] / row["seconds"]
    json.dumps(rows)


def test_state_of_another_selector_is_refused_and_changes_nothing():
    strategies = [Strategy("eagle3", 1), Strategy("eagle3", 3)]
    mine = make_selector("auto", strategies, 8)
    before = mine.state_dict()
    others = [make_selector("cost_model", strategies, 8), make_selector("auto", strategies[:1], 8)]
    for other in [*others, make_selector("auto", strategies, 16)]:
        with pytest.raises(ValueError, match="start a new selector"):
            mine.load_state_dict(other.state_dict())
    assert mine.state_dict() == before
