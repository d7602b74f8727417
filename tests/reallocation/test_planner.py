import dataclasses

import numpy as np
import pytest
import torch
from tests.reallocation.simulated import Rollout, makespan_s, perfect_split_s
from tests.tolerance import tolerance

from tlt_trl.idle.reallocation import (
    NUM_POINTS,
    ROW_NUMBERS,
    LengthSurvival,
    Move,
    RankState,
    RunningSample,
    StepTime,
    StepTimes,
    describe_rank,
    horizons,
    in_order_of_moving,
    integral,
    plan_moves,
)


# Milliseconds per token of a policy with a drafter, from docs/results.md, times the batch size.
MEASURED = StepTime.fit([1, 2, 4, 8], [0.00614, 0.00668, 0.008, 0.014])
KNEE_AT_2 = StepTime(0.010, 2.0, 0.002)
POINTS = horizons(1000)
ALWAYS = np.ones(NUM_POINTS)


def rank_state(running, movable=None, free=100, step_time=KNEE_AT_2, move_s=0.0):
    """Of a rank whose samples all run to the end."""
    movable = running if movable is None else movable
    return RankState(running * ALWAYS, ALWAYS, movable, free, step_time, move_s)


def plan(*states, **options):
    return plan_moves(np.stack([state.row() for state in states]), POINTS, **options)


def sample(key, tokens, group=0, context=None, movable=True):
    return RunningSample(key, group, tokens, tokens + 10 if context is None else context, movable)


class TestStepTime:
    def test_is_flat_up_to_the_knee_and_linear_beyond(self):
        seconds = KNEE_AT_2.seconds(np.array([0.0, 0.5, 1.0, 2.0, 3.0, 6.0]))
        assert seconds == pytest.approx([0.0, 0.005, 0.010, 0.010, 0.012, 0.018])

    @pytest.mark.parametrize("time", [KNEE_AT_2, StepTime(0.004, 1.0, 0.001), StepTime(0.02, 16.0, 0.003)])
    def test_fit_finds_the_pieces(self, time):
        batches = [1, 2, 4, 8, 16, 32]
        fitted = StepTime.fit(batches, time.seconds(np.array(batches)))
        assert (fitted.floor_s, fitted.per_sample_s) == pytest.approx((time.floor_s, time.per_sample_s))
        assert fitted.knee == time.knee

    def test_a_batch_that_costs_less_is_not_believed(self):
        assert StepTime.fit([1, 2, 4], [0.012, 0.011, 0.010]).per_sample_s == 0.0

    def test_a_batch_never_seen_is_guessed_to_be_a_little_faster(self):
        times = StepTimes()
        assert times.fit() is None
        times.observe(8, 0.020)
        assert times.fit().seconds(np.array([8.0, 1.0])) == pytest.approx([0.020, 0.015])
        times.observe(1, 0.010)
        times.observe(8, 0.030)
        assert times.fit().seconds(np.array([8.0, 1.0])) == pytest.approx([0.021, 0.010])


class TestSurvival:
    def test_counts_what_was_longer(self):
        survival = LengthSurvival(max_tokens=1000)
        for length in (100, 200, 300):
            survival.observe(length, group=None)
        # One more sample, of unlimited length: 4 longer than 0, 3 than 100, 2 than 200, 1 from 300 on.
        (row,) = survival.survival([sample("a", 0)], np.array([0.0, 99.0, 100.0, 250.0, 300.0, 999.0, 1000.0]))
        assert row == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25, 0.25, 0.0])
        (row,) = survival.survival([sample("a", 150)], np.array([0.0, 50.0, 150.0, 849.0, 850.0]))
        assert row == pytest.approx([1.0, 2 / 3, 1 / 3, 1 / 3, 0.0])

    def test_longer_so_far_means_longer_to_go(self):
        survival = LengthSurvival(max_tokens=2000)
        for length in range(10, 400, 10):
            survival.observe(length, None)
        points = horizons(2000)
        remaining = integral(survival.survival([sample("a", 0), sample("b", 350), sample("c", 390)], points), points)
        assert remaining[0] < remaining[1] < remaining[2]

    def test_siblings_count(self):
        survival = LengthSurvival(max_tokens=1000)
        survival.observe(100, group="other")
        survival.observe(500, group="mine")
        # All: 4 x {1, 1/3 from 500 on}; sibling: 1 up to 500.
        mine, other = survival.survival(
            [sample("a", 200, "mine"), sample("b", 200, "third")], np.array([0.0, 200.0, 400.0])
        )
        assert mine == pytest.approx([1.0, 1.0, (4 / 3) / (8 / 3 + 1)])
        assert other == pytest.approx([1.0, 1.0, 0.5])
        survival.start_rollout()
        again = survival.survival([sample("a", 200, "mine")], np.array([0.0, 200.0, 400.0]))
        assert again[0] == pytest.approx(other)

    def test_the_first_rollout_expects_everything_to_reach_the_limit(self):
        (row,) = LengthSurvival(1000).survival([sample("a", 400)], np.array([0.0, 599.0, 600.0]))
        assert row.tolist() == [1.0, 1.0, 0.0]


class TestOrder:
    def test_longest_to_go_first_then_the_shortest_context(self):
        survival = LengthSurvival(1000)
        samples = [
            sample("fixed", 0, movable=False),
            sample("late", 600),
            sample("long prompt", 100, context=300),
            sample("short prompt", 100, context=120),
            sample("nearly done", 940),  # 60 tokens are not worth a prefill
        ]
        order, rows = in_order_of_moving(samples, survival, POINTS)
        assert [s.key for s in order] == ["short prompt", "long prompt", "late"]
        assert rows.shape == (3, NUM_POINTS)

    def test_a_rank_describes_itself(self):
        survival = LengthSurvival(1000)
        state = describe_rank(
            [sample("a", 100), sample("b", 500), sample("c", 100, movable=False)],
            survival,
            KNEE_AT_2,
            8,
            POINTS,
            0.001,
        )
        assert (state.movable, state.free, state.step_time) == (2, 5, KNEE_AT_2)
        assert state.move_s == pytest.approx(0.001 * (110 + 510) / 2)
        assert state.running[0] == 3.0 and state.running[-1] == 0.0
        assert integral(state.running, POINTS) == pytest.approx(900 + 500 + 900, rel=0.15)  # coarse points
        assert len(state.row()) == ROW_NUMBERS

    def test_an_idle_rank_has_only_room(self):
        state = describe_rank([], LengthSurvival(1000), None, 8, POINTS)
        assert (state.movable, state.free, state.step_time) == (0, 8, None)
        assert not state.running.any() and not state.moving.any()


class TestPlan:
    def test_half_of_the_samples_go_to_the_idle_rank(self):
        # 8 samples: 1 000 tokens at 10 + 6 x 2 ms; 4 samples: at 10 + 2 x 2 ms.
        assert plan(rank_state(8), rank_state(0)) == [Move(0, 1, 4, pytest.approx(1000 * (0.022 - 0.014)))]

    def test_three_idle_ranks_share(self):
        moves = plan(rank_state(0), rank_state(8), rank_state(0), rank_state(0))
        assert [(m.donor, m.receiver, m.samples) for m in moves] == [(1, 0, 2), (1, 2, 2), (1, 3, 2)]

    def test_below_the_knee_nothing_moves(self):
        assert plan(rank_state(2), rank_state(0)) == []

    def test_balanced_ranks_keep_their_samples(self):
        assert plan(rank_state(8), rank_state(8), rank_state(8)) == []
        assert plan(*[rank_state(100 + n % 2) for n in range(10)]) == []

    def test_the_price_of_moving_counts(self):
        assert plan(rank_state(4, move_s=5.0), rank_state(0)) == []
        assert [m.samples for m in plan(rank_state(8, move_s=1.0), rank_state(0))] == [3]
        assert plan(rank_state(8), rank_state(0), min_gain_s=30.0) == []

    def test_nothing_goes_where_there_is_no_room(self):
        assert plan(rank_state(8), rank_state(0, free=0)) == []
        assert [m.samples for m in plan(rank_state(8), rank_state(0, free=1))] == [1]

    def test_nothing_moves_for_a_rank_that_cannot_be_helped(self):
        # The last rank stays the last one: moving samples of the second to last helps nobody.
        assert plan(rank_state(9, movable=0), rank_state(8), rank_state(0)) == []

    def test_a_rank_that_has_run_nothing_is_as_fast_as_the_others(self):
        moves = plan(rank_state(8), RankState.idle(free=100, step_time=None))
        assert [(m.donor, m.receiver, m.samples) for m in moves] == [(0, 1, 4)]

    def test_a_slow_rank_takes_less(self):
        slow = dataclasses.replace(KNEE_AT_2, floor_s=0.016, per_sample_s=0.004)
        assert [m.samples for m in plan(rank_state(8), rank_state(0, step_time=slow))] == [2]

    def test_the_order_of_equal_ranks_decides_and_nothing_else(self):
        states = [rank_state(n % 5 * 3) for n in range(40)]
        assert plan(*states) == plan(*states)
        again = np.frombuffer(b"".join(s.row().tobytes() for s in states)).reshape(40, ROW_NUMBERS)
        assert plan_moves(again, POINTS) == plan(*states)

    def test_nothing_runs(self):
        assert plan(rank_state(0), rank_state(0)) == []


def lengths_of_prompts(rng, num_groups, group_size, max_tokens, spread):
    """Log-normal by prompt, and again within it."""
    of_prompt = np.clip(rng.lognormal(np.log(0.25 * max_tokens), 0.7, num_groups), 8, max_tokens)
    draws = np.repeat(of_prompt, group_size) * rng.lognormal(0.0, spread, num_groups * group_size)
    return np.clip(draws, 8, max_tokens).astype(int)


def rollout(owner, length, num_ranks, step_time=MEASURED, max_tokens=2048, **options):
    owner, length = np.asarray(owner), np.asarray(length)
    return Rollout(owner, length, np.arange(len(owner)) // 8, num_ranks, max_tokens, step_time, length, **options)


class TestSimulation:
    @pytest.mark.parametrize("num_ranks", [2, 4])
    def test_eight_long_answers_on_one_rank(self, num_ranks):
        case = rollout([0] * 8, [1500] * 8, num_ranks)
        with_moves = makespan_s(case, reallocates=True)
        assert with_moves <= 1.15 * perfect_split_s(case)
        assert case.moves == 8 - 8 // num_ranks and case.plans == 1
        assert makespan_s(case, reallocates=False) > 1.4 * with_moves

    def test_four_ranks_come_close_to_a_perfect_split(self):
        ratios, gains = [], []
        for seed in range(8):
            lengths = lengths_of_prompts(np.random.default_rng(seed), 8, 8, 2048, spread=0.2)
            case = rollout(np.repeat(np.arange(4), 16), lengths, 4, interval_s=0.5)
            with_moves = makespan_s(case, reallocates=True)
            ratios.append(with_moves / perfect_split_s(case))
            gains.append(makespan_s(case, reallocates=False) / with_moves)
        assert max(ratios) <= 1.15 and np.mean(gains) > 1.1

    def test_balanced_ranks_lose_nothing(self):
        for seed in range(4):
            lengths = 1000 + np.random.default_rng(seed).integers(0, 100, 64)
            case = rollout(np.repeat(np.arange(4), 16), lengths, 4, interval_s=0.5)
            assert makespan_s(case, reallocates=True) <= 1.01 * makespan_s(case, reallocates=False)

    @pytest.mark.slow
    def test_a_thousand_ranks(self):
        """1 024 ranks with 256 samples each, eight for every prompt."""
        lengths = lengths_of_prompts(np.random.default_rng(1), 1024 * 32, 8, 4096, spread=0.3)
        owner = np.repeat(np.arange(1024), 256)
        time = StepTime(0.02, 32.0, 0.0004)
        case = rollout(owner, lengths, 1024, time, max_tokens=4096, interval_s=10.0)
        case.earlier_lengths = lengths[:2000]
        assert makespan_s(case, reallocates=True, tick_s=0.25) <= 1.06 * perfect_split_s(case)
        assert case.moves <= 0.05 * len(lengths)


def test_points_cover_the_run():
    points = horizons(4096)
    assert (points[0], points[-1], len(points)) == (0.0, pytest.approx(4096.0), NUM_POINTS)
    assert integral(ALWAYS, points) == pytest.approx(4096.0, rel=0, abs=tolerance(torch.float64, NUM_POINTS, 4096.0))
