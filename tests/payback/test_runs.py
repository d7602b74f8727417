"""
Whole runs with a simulated engine and drafter: what speculation costs in all, and when it pays.

The drafter expects `length()` tokens per verification, by the tokens it was trained on. Without drafts, rollouts take
4 s of 16 s. The selector turns speculation off where it does not pay and loses a little by trying.
"""

from dataclasses import dataclass, field

import pytest

from tlt_trl.idle.payback import ALLOWANCE_ROLLOUTS, ALLOWANCE_SWING, PATIENCE_LOSING, TRIAL_ROLLOUTS, PayBack
from tlt_trl.idle.step_account import StepAccount


STEP_S, ROLLOUT_S = 16.0, 4.0
EXPLORATION_S = 0.02
TOKENS_PER_S = 1000.0
OPTIMIZER_STEP_S = 0.4
# A verification and the drafts for it take as long as this many plain steps.
VERIFICATION = 1.5


@dataclass
class Run:
    """One process, which trains for what it is allowed, in whole optimiser steps."""

    tokens: float = 0.0
    lookups_s: float = 0.0  # saved by lookups where the drafter does not pay
    payback: PayBack = field(default_factory=lambda: PayBack(0.1, trains_in_waits=False))
    accounts: list[StepAccount] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def length(self) -> float:
        """Of a drafter that learns fast at first and has learnt most after 20 000 tokens."""
        return 1.0 + 3.0 * self.tokens / (self.tokens + 10_000.0)

    def saved_s(self) -> float:
        saved_s = ROLLOUT_S * (1.0 - VERIFICATION / self.length())
        return max(saved_s, self.lookups_s) - EXPLORATION_S

    def train(self) -> float:
        """Seconds."""
        steps = int(self.payback.plan.budget_s / OPTIMIZER_STEP_S)
        self.tokens += steps * OPTIMIZER_STEP_S * TOKENS_PER_S
        return steps * OPTIMIZER_STEP_S

    def steps(self, count: int):
        for _ in range(count):
            plan, before = self.payback.plan, self.tokens
            training_s = self.train()
            trained = self.tokens - before
            account = StepAccount(
                STEP_S,
                saved_s=self.saved_s() if plan.speculates else 0.0,
                training_s=training_s,
                capture_s=0.008 if plan.captures else 0.0,
                push_s=0.05 if trained else 0.0,
                tokens=trained,
                expected_length=self.length() if trained else None,
                first_acceptance=1.0 - 1.0 / self.length() if plan.speculates and self.length() > 1.5 else None,
                optimizer_step_s=OPTIMIZER_STEP_S,
            )
            self.accounts.append(account)
            self.payback.observe(account, len(self.accounts))
            self.lines.append(self.payback.describe())
        return self

    def net_s(self, first: int = 0) -> float:
        return sum(account.net_s for account in self.accounts[first:])

    def says(self, words: str) -> list[int]:
        """Steps whose line has these words."""
        return [step for step, line in enumerate(self.lines, start=1) if words in line]


class NeverPays(Run):
    def length(self) -> float:
        return 1.1


class TestNeverPays:
    def test_the_loss_is_bounded_by_the_allowance(self):
        run = NeverPays().steps(2000)
        # The swing is the last lump of training, and what is lost until the patience ends.
        bound_s = 0.01 * STEP_S * (ALLOWANCE_ROLLOUTS + ALLOWANCE_SWING * PATIENCE_LOSING)
        trials = len(run.says("next try in")) and 7  # pauses of 16 to 1024 rollouts
        bound_s += trials * 0.01 * STEP_S * (TRIAL_ROLLOUTS + PATIENCE_LOSING)
        assert -bound_s < run.net_s() < 0.0
        # Next to nothing of the second half.
        assert run.net_s(1000) > -0.0005 * 1000 * STEP_S
        assert not run.says("starts to pay")

    def test_no_step_loses_much_on_average(self):
        run = NeverPays().steps(200)
        for first in range(0, 200, 25):
            loss_s = -sum(account.net_s for account in run.accounts[first : first + 25]) / 25
            assert loss_s <= ALLOWANCE_SWING * 0.01 * STEP_S


class TestPaysLate:
    def test_the_allowance_teaches_a_drafter_that_then_pays_for_itself(self):
        run = Run().steps(400)
        starts, ahead = run.says("starts to pay"), run.says("ahead of a run without")
        assert len(ahead) == 1 and starts[0] < ahead[0] < 200
        assert run.net_s() > 0.05 * 400 * STEP_S
        # Until then it has cost no more than it may.
        assert min(sum(a.net_s for a in run.accounts[:n]) for n in range(1, 200)) > -0.011 * STEP_S * starts[0]

    def test_lookups_pay_for_a_drafter_that_was_not_given(self):
        alone, with_lookups = Run().steps(40), Run(lookups_s=0.4).steps(40)
        assert with_lookups.says("starts to pay") == [1]
        assert all(sum(a.net_s for a in with_lookups.accounts[:n]) > 0.0 for n in range(1, 40))
        assert with_lookups.tokens >= alone.tokens > 0

    def test_at_most_half_of_what_is_saved_is_spent_once_it_pays(self):
        run = Run().steps(400)
        late = run.accounts[200:]
        assert sum(a.spent_s for a in late) < 0.5 * sum(a.saved_s for a in late)

    def test_a_drafter_that_has_learnt_costs_next_to_nothing(self):
        run = Run(tokens=1_000_000.0).steps(100)
        # Nor is it expensive to find that out.
        for accounts, share in ((run.accounts[5:50], 0.02), (run.accounts[50:], 0.005)):
            assert sum(a.spent_s for a in accounts) < share * STEP_S * len(accounts)


class TestPaysThenStops:
    def test_the_run_goes_on_plain_and_comes_back(self):
        run = Run(tokens=20_000.0).steps(100)
        assert run.payback.verdict() == "paying"
        saved_s = run.saved_s
        run.saved_s = lambda: -0.4
        run.steps(60)
        assert run.payback.is_paused
        lost_s = -run.net_s(100)
        assert lost_s < 0.4 * (12 + PATIENCE_LOSING + 2 * TRIAL_ROLLOUTS)
        run.saved_s = saved_s
        run.steps(80)
        assert run.payback.verdict() == "paying"


class TestJump:
    def test_the_drafter_follows_the_policy(self):
        run = Run(tokens=100_000.0).steps(150)
        calm = sum(a.training_s for a in run.accounts[100:])
        run.tokens = 3_000.0  # what it knows is of little use now
        run.steps(50)
        assert sum(a.training_s for a in run.accounts[150:]) > 3 * calm
        run.steps(250)
        assert run.payback.verdict() == "paying" and run.length() > 2.5
        assert run.net_s(150) > 0.0


@pytest.mark.parametrize("kind", [NeverPays, Run])
def test_ranks_decide_the_same(kind):
    one, other = kind(), kind()
    for _ in range(10):
        one.steps(20), other.steps(20)
        assert one.lines == other.lines and one.payback.plan == other.payback.plan
