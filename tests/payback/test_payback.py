"""The controller on numbers made for it: what is earned, when it ends, what a run can lose."""

from dataclasses import replace

import pytest

from tlt_trl.idle.payback import (
    ALLOWANCE_ROLLOUTS,
    FIRST_PAUSE,
    MIN_EFFORT,
    PATIENCE_LOSING,
    TRIAL_ROLLOUTS,
    UNTRAINED_ROLLOUTS,
    PayBack,
)
from tlt_trl.idle.step_account import StepAccount


STEP_S = 16.0
ALLOWANCE_S = 0.01 * STEP_S
STEADY = StepAccount(STEP_S)
# Enough for an observation of the drafter's expected acceptance.
OBSERVED = replace(STEADY, tokens=2048, expected_length=2.0)


def make(max_share=0.5, trains_in_waits=False, has_prices=True):
    return PayBack(max_share, trains_in_waits, has_prices)


def feed(payback, *accounts, times=1, step=1):
    for account in accounts * times:
        payback.observe(account, step)
    return payback


def after_learning(payback, account=OBSERVED):
    """The expected acceptance does not rise, so that the allowance ends."""
    feed(payback, account, times=4)
    assert not payback.is_learning
    return payback


class TestEarning:
    def test_nothing_is_spent_before_the_first_account(self):
        plan = make().plan
        assert plan.budget_s == 0.0 and plan.captures and plan.trains and plan.speculates

    def test_while_the_drafter_learns_a_run_may_lose_a_hundredth(self):
        assert feed(make(), STEADY).plan.budget_s == pytest.approx(ALLOWANCE_S)

    def test_all_costs_of_speculation_are_in_it(self):
        # Running means begin at 0 and give the newest rollout a quarter.
        account = replace(STEADY, saved_s=-0.08, capture_s=0.04, push_s=0.08)
        assert feed(make(), account).plan.budget_s == pytest.approx(ALLOWANCE_S - 0.02 - 0.03)

    def test_an_eighth_of_what_is_saved_at_first(self):
        # More than the allowance, which it contains.
        assert feed(make(), replace(STEADY, saved_s=8.0)).plan.budget_s == pytest.approx(0.125 * 2.0)

    def test_the_time_budget_is_a_cap(self):
        assert feed(make(max_share=0.02), replace(STEADY, saved_s=16.0)).plan.budget_s == pytest.approx(0.02 * STEP_S)
        assert feed(make(max_share=0.0), replace(STEADY, saved_s=16.0)).plan.budget_s == 0.0

    def test_at_most_half_with_all_side_costs(self):
        # Means of 2.0 and 0.85 after the first rollout; an eighth would be more, and the allowance is used up.
        account = replace(STEADY, saved_s=8.0, capture_s=1.0, merging_s=1.2, push_s=1.2)
        assert feed(make(), account).plan.budget_s == pytest.approx(0.5 * 2.0 - 0.85)

    def test_what_is_left_is_carried_over_for_longer_optimiser_steps(self):
        account = replace(STEADY, optimizer_step_s=0.2)  # two of them take 0.4 s
        payback = make()
        assert [feed(payback, account).plan.budget_s for _ in range(3)] == pytest.approx([0.0, 0.0, 3 * ALLOWANCE_S])
        # And a debt is paid back.
        assert feed(payback, replace(account, training_s=0.6)).plan.budget_s == 0.0
        budgets_s = [feed(payback, account).plan.budget_s for _ in range(3)]
        assert budgets_s == pytest.approx([0.0, 0.0, 7 * ALLOWANCE_S - 0.6])

    def test_time_without_anything_to_train_on_does_not_come_back(self):
        payback = feed(make(), replace(STEADY, was_starved=True), times=20)
        assert payback.plan.budget_s == pytest.approx(ALLOWANCE_S)

    def test_what_was_trained_in_waits_counts_and_leaves_no_debt(self):
        payback = make(trains_in_waits=True)
        assert feed(payback, replace(STEADY, free_s=5.0)).plan.budget_s == pytest.approx(ALLOWANCE_S)
        assert feed(payback, replace(STEADY, free_s=5.0)).plan.budget_s == pytest.approx(ALLOWANCE_S)
        assert feed(payback, replace(STEADY, free_s=0.06)).plan.budget_s == pytest.approx(2 * ALLOWANCE_S - 0.06)


class TestWithoutPrices:
    def test_one_process_may_take_its_cap(self):
        payback = feed(make(has_prices=False), replace(STEADY, saved_s=-9.0), times=100)
        assert payback.plan.speculates and "not measured" in payback.describe()
        assert payback.metrics(STEADY)["tlt/payback/budget_s"] == pytest.approx(100 * 0.5 * STEP_S)

    def test_where_there_are_waits_little_is_added(self):
        payback = feed(make(has_prices=False, trains_in_waits=True), STEADY)
        assert payback.plan.budget_s == pytest.approx(ALLOWANCE_S)


class TestLearning:
    def test_the_allowance_ends_when_acceptance_stops_rising(self):
        payback = make()
        for length in (1.0, 1.5, 2.5, 3.5, 4.0):
            assert feed(payback, replace(OBSERVED, expected_length=length)).is_learning
        feed(payback, replace(OBSERVED, expected_length=3.0), times=2)
        assert payback.is_learning
        assert not feed(payback, replace(OBSERVED, expected_length=3.0)).is_learning

    def test_and_after_a_number_of_rollouts(self):
        payback = feed(make(), replace(STEADY, saved_s=1.0), times=ALLOWANCE_ROLLOUTS - 1)
        assert payback.is_learning and not feed(payback, STEADY).is_learning

    def test_few_tokens_are_no_observation(self):
        payback = feed(make(), replace(OBSERVED, tokens=100), times=80)
        assert payback.is_learning
        assert not feed(payback, replace(OBSERVED, tokens=100), times=20).is_learning

    def test_a_drafter_with_nothing_left_to_learn_trains_less_and_less(self):
        account = replace(OBSERVED, saved_s=8.0)
        payback = after_learning(make(), account)
        assert payback.metrics(account)["tlt/payback/effort"] == 0.125 / 8
        feed(payback, account, times=20)
        assert payback.metrics(account)["tlt/payback/effort"] == MIN_EFFORT
        before_s = payback.plan.budget_s
        earned_s = feed(payback, account).plan.budget_s - before_s
        assert earned_s == pytest.approx(MIN_EFFORT * 8.0, rel=0.01)

    def test_features_are_copied_only_where_they_may_be_trained_on(self):
        account = replace(OBSERVED, saved_s=0.8, optimizer_step_s=0.3)
        payback = after_learning(make(), replace(account, training_s=0.16))
        assert not payback.plan.captures
        captured, trained = [], []
        for rollout in range(100):
            plan = feed(payback, replace(account, tokens=0, expected_length=None)).plan
            captured += [rollout] * plan.captures
            if plan.budget_s:
                trained.append(rollout)
                break
        # From a few rollouts before the training on, and not all the time.
        assert 2 <= trained[0] - captured[0] <= 4 and captured == list(range(captured[0], trained[0] + 1))

    def test_waits_are_always_trained_in(self):
        payback = after_learning(make(max_share=0.0, trains_in_waits=True))
        assert payback.plan.captures and payback.plan.trains and payback.plan.budget_s == 0.0
        assert not make(max_share=0.0).plan.captures

    def test_when_the_policy_moves_it_learns_again(self):
        account = replace(OBSERVED, saved_s=8.0, first_acceptance=0.8)
        payback = feed(after_learning(make(), account), account, times=10)
        feed(payback, replace(account, first_acceptance=0.75))
        assert not payback.is_learning  # noise
        feed(payback, replace(account, first_acceptance=0.4))
        assert payback.is_learning and payback.metrics(account)["tlt/payback/effort"] == 0.5

    def test_without_drafts_in_rollouts_training_batches_tell(self):
        account = replace(OBSERVED, saved_s=8.0, expected_length=4.0)
        payback = after_learning(make(), account)
        feed(payback, replace(account, expected_length=2.0))
        assert payback.is_learning

    def test_new_answers_are_no_move_while_rollouts_accept_as_before(self):
        account = replace(OBSERVED, saved_s=8.0, expected_length=4.0, first_acceptance=0.8)
        payback = after_learning(make(), account)
        assert not feed(payback, replace(account, expected_length=2.0)).is_learning

    def test_a_drafter_that_never_paid_gets_no_second_allowance(self):
        losing = replace(OBSERVED, saved_s=-0.01, first_acceptance=0.8)
        payback = after_learning(make(), losing)
        assert not feed(payback, replace(losing, first_acceptance=0.2)).is_learning


class TestPausing:
    LOSS = replace(STEADY, saved_s=-0.4)

    def test_a_loss_within_the_allowance_is_no_loss(self):
        payback = feed(make(), replace(STEADY, saved_s=-0.1, training_s=0.06), times=ALLOWANCE_ROLLOUTS - 1)
        assert payback.plan.speculates

    def test_after_some_rollouts_beyond_it_the_run_is_plain(self):
        payback = feed(make(trains_in_waits=True), self.LOSS, times=50)
        assert not payback.plan.speculates
        payback = make(trains_in_waits=True)
        rollouts = next(number for number in range(1, 50) if not feed(payback, self.LOSS).plan.speculates)
        # The mean of the losses passes 0.24 s in the fourth rollout.
        assert rollouts == 3 + PATIENCE_LOSING
        plan = payback.plan
        assert not plan.trains and not plan.captures and plan.budget_s == 0.0

    def test_it_is_tried_again_after_pauses_that_double(self):
        payback, states = make(), []
        for _ in range(150):
            loss = self.LOSS if payback.plan.speculates else STEADY
            states.append(feed(payback, loss).plan.speculates)
        ends = [i for i in range(1, 150) if states[i] != states[i - 1]]
        lengths = [end - begin for begin, end in zip(ends, ends[1:], strict=False)]
        assert lengths == [16, TRIAL_ROLLOUTS, 32, TRIAL_ROLLOUTS, 64, TRIAL_ROLLOUTS]

    def test_a_trial_that_pays_ends_the_pauses(self):
        payback = feed(make(), self.LOSS, times=3 + PATIENCE_LOSING + FIRST_PAUSE)
        assert payback.plan.speculates and payback.verdict() == "trying again"
        feed(payback, replace(STEADY, saved_s=2.0), times=TRIAL_ROLLOUTS + 20)
        assert payback.plan.speculates and payback.verdict() == "paying"
        rollouts = next(number for number in range(1, 50) if not feed(payback, self.LOSS).plan.speculates)
        assert f"next try in {FIRST_PAUSE} rollouts" in payback.describe() and rollouts > PATIENCE_LOSING

    def test_savings_of_lookups_pay_for_a_drafter_that_learns(self):
        # Two names swapped and no drafter given.
        account = replace(STEADY, saved_s=0.6, training_s=0.2, tokens=300, expected_length=1.2)
        payback = feed(make(), account, times=ALLOWANCE_ROLLOUTS)
        assert payback.plan.speculates and payback.verdict() == "paying"


class TestWords:
    def test_one_line(self):
        payback = feed(make(), replace(STEADY, saved_s=4.0, training_s=0.8), step=3)
        assert payback.describe() == (
            "pay-back: +0.8 s a step (+5.0 %; saves 1 s, costs 0.2 s), paying; speculation starts to pay at step 3"
        )
        assert feed(payback, replace(STEADY, saved_s=4.0)).describe().endswith("paying")

    def test_when_the_run_is_ahead(self):
        payback = feed(make(), replace(STEADY, saved_s=-1.0), step=1)
        assert payback.describe().endswith("does not pay yet")
        feed(payback, replace(STEADY, saved_s=0.9), step=2)
        assert "ahead" not in payback.describe()
        feed(payback, replace(STEADY, saved_s=0.2), step=3)
        assert "ahead of a run without speculation from step 3 on" in payback.describe()
        assert "ahead" not in feed(payback, replace(STEADY, saved_s=0.2), step=4).describe()

    def test_metrics_are_the_accounts(self):
        account = replace(STEADY, saved_s=4.0, training_s=0.5, merging_s=0.125, capture_s=0.25, push_s=0.125)
        metrics = feed(make(), account, times=2).metrics(account)
        assert (metrics["tlt/payback/saved_s"], metrics["tlt/payback/spent_s"]) == (4.0, 1.0)
        assert (metrics["tlt/payback/net_s"], metrics["tlt/payback/total_net_s"]) == (3.0, 6.0)
        assert metrics["tlt/payback/step_share"] == 3.0 * (1.0 - 0.75**2) / STEP_S
        assert (metrics["tlt/payback/learning"], metrics["tlt/payback/paused"]) == (1.0, 0.0)

    @pytest.mark.parametrize(
        ("options", "account", "reason"),
        [
            ({"max_share": 0.0, "trains_in_waits": True}, STEADY, "`drafter_time_budget=0` leaves waits only"),
            ({}, replace(STEADY, was_starved=True), "no hidden states"),
            ({}, replace(STEADY, optimizer_step_s=9.0), "2 optimiser steps take 18 s"),
        ],
    )
    def test_why_nothing_was_trained(self, options, account, reason):
        payback = feed(make(**options), account, times=UNTRAINED_ROLLOUTS - 1)
        assert not payback.why_untrained()
        assert reason in feed(payback, account).why_untrained()
        assert not feed(payback, replace(account, tokens=1)).why_untrained()

    def test_a_drafter_that_need_not_be_trained_is_no_fault(self):
        payback = after_learning(make(), replace(OBSERVED, saved_s=1.0))
        assert not feed(payback, replace(STEADY, saved_s=1.0), times=100).why_untrained()
        assert not feed(make(), TestPausing.LOSS, times=60).why_untrained()


class TestState:
    def test_a_resumed_run_decides_as_the_unbroken_one(self):
        accounts = [
            replace(OBSERVED, saved_s=0.5 - 0.02 * i, training_s=0.1, expected_length=1.0 + (i % 7)) for i in range(80)
        ]
        unbroken = feed(make(), *accounts[:40])
        resumed = make()
        resumed.start_run()
        resumed.load_state_dict(unbroken.state_dict())
        assert resumed.plan == unbroken.plan
        for account in accounts[40:]:
            assert feed(resumed, account).plan == feed(unbroken, account).plan
            assert resumed.metrics(account) == unbroken.metrics(account)
        assert not unbroken.plan.speculates

    def test_another_run_begins_afresh(self):
        payback = feed(make(), TestPausing.LOSS, times=60)
        payback.start_run()
        assert payback.plan == make().plan and payback.state_dict() == make().state_dict()
