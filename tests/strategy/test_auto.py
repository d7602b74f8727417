import random

import numpy as np
import pytest

from tlt_trl.strategy import AutoSelector, Strategy
from tlt_trl.strategy.auto import FirstUsePrice


ARMS = [Strategy.off(), Strategy("eagle3", 1), Strategy("eagle3", 3), Strategy("eagle3", 5)]


def play(selector, steps, rate_of, batch=4, compile_s=0.0, rng=None):
    """Plays `steps` steps of 10 ms for off; `rate_of(strategy)` is the rate relative to off. Returns counts."""
    rng, counts, used = rng or random.Random(0), {}, set()
    for step in range(steps):
        if step % 200 == 0:
            selector.start_rollout()
        strategy = selector.select(batch)
        accepted = sum(rng.random() < 0.5 for _ in range(batch)) if strategy.num_draft_tokens else 0
        by_position = [accepted] + [0] * (strategy.num_draft_tokens - 1)
        mean_tokens = batch * (1.0 if strategy.is_off else 1.5)
        seconds = 0.010 * mean_tokens / batch / rate_of(strategy) * rng.uniform(0.95, 1.05)
        if strategy not in used:
            used.add(strategy)
            seconds += compile_s
        by_position = by_position[: strategy.num_draft_tokens]
        selector.update(strategy, batch, batch + accepted, seconds, 0, by_position)
        counts[str(strategy)] = counts.get(str(strategy), 0) + 1
    return counts


def test_first_choice_is_the_baseline():
    assert AutoSelector(ARMS, [1, 2, 4]).select(4).is_off


def test_first_use_price_is_the_median_excess():
    price = FirstUsePrice(1, 4)
    for arm, first_s in enumerate((1.0, 2.0, 30.0)):
        price.update(0, arm, first_s + 0.1)
        price.update(0, arm, 0.1)
    assert price.price_s() == pytest.approx(2.0)
    assert price.spent_s[0] == pytest.approx(0.3)
    values = np.array([10.0, 10.0, 10.0, 10.0])
    price.discount(0, values)  # only the last arm is unused: 0.3 s spent against a price of 2 s
    np.testing.assert_allclose(values, [10.0, 10.0, 10.0, 10.0 * 0.3 / 2.3])


def test_a_bucket_without_any_use_is_not_discounted():
    price = FirstUsePrice(2, 2)
    price.update(0, 0, 1.0)
    price.update(0, 0, 0.1)
    values = np.array([3.0, 4.0])
    price.discount(1, values)
    np.testing.assert_array_equal(values, [3.0, 4.0])


def test_finds_an_arm_that_the_linear_model_denies():
    # 3 draft tokens are best, its neighbours 1 and 5 are slower than off: no smooth model says so.
    rates = {0: 1.0, 1: 0.9, 3: 1.3, 5: 0.9}
    selector = AutoSelector(ARMS, [1, 2, 4])
    play(selector, 3000, lambda s: rates[s.num_draft_tokens])
    counts = play(selector, 2000, lambda s: rates[s.num_draft_tokens])
    assert counts["eagle3 x3"] > 1850


def test_hopeless_arms_cost_no_more_than_the_budget():
    selector = AutoSelector(ARMS, [1, 2, 4])
    counts = play(selector, 6000, lambda s: 1.0 if s.is_off else 0.4)
    exploration = selector.exploration()
    # The budget is checked before an exploration, so it can be passed by one: four steps of 37 ms.
    grace_s = 1000 * exploration["elapsed_s"] / 6000
    assert 0 < exploration["lost_s"] <= 0.005 * (exploration["elapsed_s"] + grace_s) + 4 * 0.04
    assert counts["off"] > 0.985 * 6000


def test_no_budget_no_exploration():
    counts = play(AutoSelector(ARMS, [1, 2, 4], exploration_budget=0.0), 2000, lambda s: 1.0 if s.is_off else 0.2)
    assert sum(n for name, n in counts.items() if name != "off") < 40  # what the prior believed in until measured


def test_compilation_is_charged_to_the_budget():
    selector = AutoSelector(ARMS, [1, 2, 4])
    play(selector, 1000, lambda s: 1.0 if s.is_off else 0.6, compile_s=2.0)
    assert selector.exploration()["first_use_s"] == pytest.approx(2.0, abs=0.1)
    assert sum(row["visits"] > 0 for row in selector.summary()) <= 3  # 10 s of work do not buy every arm for 2 s each


def test_returns_to_speculation_when_the_drafter_improves():
    selector, rng = AutoSelector(ARMS, [1, 2, 4]), random.Random(0)
    before = play(selector, 3000, lambda s: 1.0 if s.is_off else 0.7, rng=rng)
    after = play(selector, 3000, lambda s: 1.0 if s.is_off else 1.5, rng=rng)
    assert before["off"] > 2850
    assert after.get("off", 0) < 600


def test_explain_orders_by_value():
    selector = AutoSelector(ARMS, [1, 2, 4])
    play(selector, 500, lambda s: 1.0 + 0.1 * s.num_draft_tokens)
    rows = selector.explain(4)
    assert [row["value_tokens_per_s"] for row in rows] == sorted((r["value_tokens_per_s"] for r in rows), reverse=True)
    assert {"strategy", "predicted_tokens", "predicted_s", "correction"} <= set(rows[0])
