import random

import numpy as np
import pytest
import torch
from tests.tolerance import tolerance

from tlt_trl.strategy import CostModelSelector, Strategy
from tlt_trl.strategy.acceptance import AcceptanceModel, spread_accepted
from tlt_trl.strategy.step_time import StepTimeModel, nonnegative_ridge


ARMS = [Strategy.off(), Strategy("eagle3", 1), Strategy("eagle3", 3), Strategy("eagle3", 5), Strategy("ngram", 4)]


def seconds(batch, k, context=0, per_draft=0.002):
    return 0.010 + 0.0001 * batch + 0.0008 * batch * (k + 1) + 1e-7 * context + per_draft * k


def test_acceptance_counts_are_exact():
    model = AcceptanceModel(3, memory=1e12, prior=0.5, prior_weight=0.0)
    model.update(10, [8, 4, 1])
    model.update(10, [6, 3, 3])
    # 14/20, 7/14, 4/7
    assert model.expected_tokens() == pytest.approx([1.0, 1.7, 2.05, 2.25])
    model.update(20, [20])  # a shorter draft says nothing about later positions
    assert model.expected_tokens() == pytest.approx([1.0, 1.85, 1.85 + 0.425, 1.85 + 0.425 + 0.425 * 4 / 7])


def test_acceptance_prior_and_extrapolation():
    model = AcceptanceModel(3, prior=0.5, prior_weight=4.0)
    assert model.expected_tokens() == pytest.approx([1.0, 1.5, 1.75, 1.875])
    model.update(6, [6])  # (6 + 4 * 0.5) / (6 + 4) = 0.8, passed on to the positions never tried
    assert model.expected_tokens() == pytest.approx([1.0, 1.8, 2.44, 2.952])
    model.forget(0.0)
    assert model.expected_tokens() == pytest.approx([1.0, 1.5, 1.75, 1.875])


def test_acceptance_forgets_by_requests():
    model = AcceptanceModel(1, memory=100.0, prior_weight=0.0)
    for _ in range(50):
        model.update(10, [9])
    for _ in range(50):
        model.update(10, [1])
    assert model.expected_tokens()[1] == pytest.approx(1.1, abs=0.01)


@pytest.mark.parametrize(("batch", "k", "accepted"), [(4, 2, 3), (1, 5, 0), (1, 5, 5), (8, 3, 17), (3, 1, 2)])
def test_spread_accepted_keeps_the_sum(batch, k, accepted):
    spread = spread_accepted(batch, k, accepted)
    assert len(spread) == k
    # 30 halvings give the rate; a sum of k powers of it has a slope of at most k (k + 1) / 2.
    assert sum(spread) == pytest.approx(accepted, rel=0, abs=batch * k * (k + 1) / 2 * 2**-30)
    rounding = tolerance(torch.float64, k, scale=batch)
    assert all(late <= early + rounding for early, late in zip(spread, spread[1:], strict=False))


def test_nonnegative_ridge_equals_least_squares_when_all_are_positive():
    rng = np.random.default_rng(0)
    x = rng.uniform(0.1, 1.0, (50, 3))
    weights = rng.uniform(0.5, 1.0, 50)
    # reference: ordinary least squares with the ridge written as three more rows
    rows = np.vstack([x * np.sqrt(weights)[:, None], np.sqrt(0.3) * np.eye(3)])
    reference = np.linalg.lstsq(rows, np.concatenate([np.sqrt(weights), np.sqrt(0.3) * np.ones(3)]), rcond=None)[0]
    assert reference.min() > 0
    # Sums over 50 rows, solved in three unknowns; the condition number of the squared system stays below 1000.
    limit = tolerance(torch.float64, 50 + 3, scale=1000 * reference.max())
    np.testing.assert_allclose(nonnegative_ridge(x, weights, 0.3), reference, rtol=0, atol=limit)


def test_nonnegative_ridge_drops_negative_coefficients():
    x = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]) / np.array([[3.0], [2.0], [1.0]])  # falls with the 2nd feature
    solution = nonnegative_ridge(x, np.ones(3), 1e-6)
    assert solution[1] == 0.0 and solution[0] > 0.0


@pytest.mark.parametrize("spikes", [0.0, 0.1])
def test_step_time_model_recovers_a_linear_law(spikes):
    rng = random.Random(0)
    model = StepTimeModel(ARMS, 16)
    for _ in range(1500):
        batch, arm = rng.choice((1, 2, 4, 8, 12)), rng.randrange(len(ARMS))
        context = 100 * batch
        k = ARMS[arm].num_draft_tokens
        per_draft = 0.0005 if ARMS[arm].method == "ngram" else 0.002
        spike = 10.0 if rng.random() < spikes else 1.0
        model.update(batch, arm, seconds(batch, k, context, per_draft) * rng.uniform(0.97, 1.03) * spike, context)
    for batch in (1, 3, 8, 16):  # 3 and 16 were never seen
        for arm, strategy in enumerate(ARMS):
            per_draft = 0.0005 if strategy.method == "ngram" else 0.002
            truth = seconds(batch, strategy.num_draft_tokens, 100 * batch, per_draft)
            assert model.predict(batch, 100 * batch)[arm] == pytest.approx(truth, rel=0.08)


def test_machine_drift_is_followed():
    model = StepTimeModel(ARMS, 8)
    for step in range(640):
        model.update(1 + step % 8, step // 8 % 2, seconds(1 + step % 8, step // 8 % 2), 0)
    for step in range(160):
        model.update(1 + step % 8, 0, 1.2 * seconds(1 + step % 8, 0), 0)  # slower, while only "off" runs
    assert model.log_drift > 0.1
    # "off" was never seen to gain on 1 draft token, which was not measured since
    assert model.predict(4, 0)[1] / model.predict(4, 0)[0] == pytest.approx(seconds(4, 1) / seconds(4, 0), rel=0.1)


def test_selector_plays_and_explains_the_best_prediction():
    selector = CostModelSelector(ARMS[:4], [1, 2, 4, 8], min_dwell_steps=1)
    rng = random.Random(1)
    for _ in range(400):
        batch = rng.choice((1, 2, 4, 8))
        strategy = rng.choice(ARMS[:4])
        k = strategy.num_draft_tokens
        accepted = [round(batch * 0.75 ** (i + 1)) if batch > 1 else int(rng.random() < 0.75) for i in range(k)]
        accepted = [min(accepted[: i + 1]) for i in range(k)]
        selector.update(strategy, batch, batch + sum(accepted), seconds(batch, k), 0, accepted)
    assert selector.select(8).is_off  # the first decision is the baseline
    rows = selector.explain(4)
    assert selector.select(4) == Strategy.parse(rows[0]["strategy"])
    assert [r["predicted_tokens_per_s"] for r in rows] == sorted(r["predicted_tokens_per_s"] for r in rows)[::-1]
    for row in rows:
        assert row["predicted_tokens_per_s"] == pytest.approx(row["predicted_tokens"] / row["predicted_s"])


def test_selector_probes_once_per_rollout_while_off_wins():
    selector = CostModelSelector(ARMS[:3], [4], min_dwell_steps=1)
    for rollout in range(6):
        selector.start_rollout()
        chosen = []
        for _ in range(40):
            strategy = selector.select(4)
            k = strategy.num_draft_tokens
            selector.update(strategy, 4, 4, 0.01 * (1 + k), 0, [0] * k)  # nothing is accepted
            chosen.append(strategy)
        if rollout >= 2:
            assert sum(not s.is_off for s in chosen) == 1
