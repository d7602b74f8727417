import random

import pytest

from tlt_trl.strategy import BEGMAB, Strategy


OFF, K1, K3 = Strategy.off(), Strategy("eagle3", 1), Strategy("eagle3", 3)
ARMS = [OFF, K1, K3]


def feed(mab, strategy, batch_size, tokens_per_request, seconds, times):
    for _ in range(times):
        mab.update(strategy, batch_size, int(batch_size * tokens_per_request), seconds)


def values(mab, bucket):
    """What each arm is worth in a bucket; 0.0 while unseen."""
    rows = mab.summary()[bucket * len(mab.strategies) : (bucket + 1) * len(mab.strategies)]
    return [row["predicted_tokens_per_s"] or 0.0 for row in rows]


def cells(mab, bucket):
    """What is known of each arm in a bucket, by strategy."""
    return dict(zip(map(str, mab.strategies), mab.state_dict()["cells"][bucket], strict=True))


def test_value_is_mean_tokens_times_median_rate():
    mab = BEGMAB(ARMS, [4], warmup_steps=1, min_samples=3)
    mab.update(K3, 2, 8, 30.0)  # compiles: not learned from
    assert values(mab, 0) == [0.0, 0.0, 0.0]
    for emitted, seconds in ((8, 0.1), (2, 0.1), (5, 10.0)):  # the last one is a spike
        mab.update(K3, 2, emitted, seconds)
    # mean(4, 1, 2.5) tokens per request * lower median(20, 20, 0.2) requests per second
    assert values(mab, 0) == [0.0, 0.0, 2.5 * 20.0]


def test_window_forgets():
    mab = BEGMAB(ARMS, [4], window=4, warmup_steps=0, min_samples=1, drift=9.0)
    feed(mab, K1, 4, 1.0, 0.1, 10)
    feed(mab, K1, 4, 2.0, 0.05, 4)
    assert values(mab, 0)[1] == pytest.approx(2.0 * 80.0)


def test_median_of_quotients_would_prefer_the_wrong_arm():
    # One request. 1 draft token: 2 tokens in 10 ms, always. 3 draft tokens: 4 tokens in 15 ms in three of five steps,
    # 1 in the other two: 187 tokens/s against 200, while the median of the quotients says 267 against 200.
    mab = BEGMAB(ARMS, [1], warmup_steps=0, min_samples=1, epsilon=0.0, min_dwell_steps=1, drift=9.0)
    for i in range(50):
        mab.update(OFF, 1, 1, 0.010)
        mab.update(K1, 1, 2, 0.010)
        mab.update(K3, 1, 4 if i % 5 < 3 else 1, 0.015)
    assert mab.select(1) == K1


def test_unseen_arms_are_tried_first_then_the_best_is_played():
    mab = BEGMAB(ARMS, [4], epsilon=0.0, warmup_steps=1, min_samples=2, min_dwell_steps=1)
    seconds = {OFF: 0.1, K1: 0.1, K3: 0.2}
    chosen = []
    for _ in range(12):
        strategy = mab.select(4)
        mab.update(strategy, 4, 4 * (1 + strategy.num_draft_tokens), seconds[strategy])
        chosen.append(strategy)
    # warm-up and two samples each; then 40, 80 and 80 tokens/s: the first of the best
    assert chosen == [OFF] * 3 + [K1] * 3 + [K3] * 3 + [K1] * 3


def test_every_arm_of_every_bucket_is_tried():
    arms = [OFF, *(Strategy("eagle3", k) for k in range(1, 7))]
    mab = BEGMAB(arms, [1, 2, 4, 8], rng=random.Random(0))
    for step in range(3000):
        batch = (1, 2, 4, 8)[step // 4 % 4]
        strategy = mab.select(batch)
        mab.update(strategy, batch, batch, 0.01)  # nothing is ever accepted
    assert all(row["visits"] > 0 for row in mab.summary())


def test_neighbour_keeps_a_rare_bucket_from_hopeless_arms():
    mab = BEGMAB(ARMS, [1, 2, 4], epsilon=0.0, min_dwell_steps=1, warmup_steps=0, min_samples=1)
    feed(mab, OFF, 4, 1.0, 0.010, 5)
    feed(mab, K1, 4, 1.0, 0.011, 5)
    feed(mab, K3, 4, 1.0, 0.030, 5)
    chosen = []
    for _ in range(6):
        strategy = mab.select(1)
        mab.update(strategy, 1, 1, 0.010 if strategy == OFF else 0.011)
        chosen.append(strategy)
    assert chosen == [OFF, K1, OFF, OFF, OFF, OFF]  # in the neighbour's order; 3 tokens are a third as fast there


def test_exploration_decays_and_reopens():
    def explored(mab, decisions):
        best = 0
        for _ in range(decisions):
            best += mab.select(4) != K1
        return best

    mab = BEGMAB(ARMS, [4], epsilon=1.0, rng=random.Random(0), min_dwell_steps=1, warmup_steps=0, min_samples=1)
    feed(mab, OFF, 4, 1.0, 0.02, 5)
    feed(mab, K1, 4, 2.0, 0.02, 64)
    feed(mab, K3, 4, 2.0, 0.022, 5)
    early = explored(mab, 500)
    late = explored(mab, 500)
    assert early > 1.5 * late > 0
    tried = {name: cell["trials"] for name, cell in cells(mab, 0).items()}
    assert tried["eagle3 x3"] > 2 * tried["off"] > 0  # the arm at half the rate is explored far less

    feed(mab, K1, 4, 1.0, 0.02, 40)  # its tokens halve: drift
    assert all(cell["trials"] == 0.0 for cell in cells(mab, 0).values())
    assert values(mab, 0)[1] == pytest.approx(200.0, rel=0.01)


def test_spikes_are_not_drift():
    mab = BEGMAB(ARMS, [4], warmup_steps=0, min_samples=1)
    for i in range(400):
        mab.update(K1, 4, 8, 0.1 if i % 50 == 49 else 0.01)
    window = cells(mab, 0)["eagle3 x1"]
    assert len(window["tokens_per_request"]) == len(window["requests_per_s"]) == 64  # never cleared
