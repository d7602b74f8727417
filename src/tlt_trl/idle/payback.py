"""
What the drafter may cost, decided from what speculation brings.

A whole step must not take longer than without speculation. Rollouts save seconds; training the drafter, merging and
pushing it, and copying hidden states for it cost some. This file only does the arithmetic: every rank feeds it the
same totals once per training rollout and comes to the same decisions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .step_account import StepAccount


# Weight of the newest rollout in running means. They begin at 0, so that a first rollout decides little.
NEWEST_WEIGHT = 0.25

# Largest share of what is saved that training and its side costs may take.
MAX_EFFORT = 0.5
# A drafter that was given may have nothing to learn, so it has to show first that more effort helps.
FIRST_EFFORT = 0.125
# What keeps an eye on a drafter that has nothing left to learn.
MIN_EFFORT = 1 / 64

# Share of a step that a run may lose while its drafter learns, all costs of speculation included.
ALLOWANCE_SHARE = 0.01
# Rollouts for which it is granted, unless the drafter stops learning before.
ALLOWANCE_ROLLOUTS = 128
# Observations without a rise that end it.
PATIENCE_FLAT = 3
# Tokens of training batches that make one observation: the expected acceptance of fewer is mostly noise.
TOKENS_PER_OBSERVATION = 2048

# A rise and a fall of the expected acceptance, as shares of the best so far.
RISE = 0.01
FALL = 0.1

# Rollouts with a net loss beyond the allowance after which speculation pauses.
PATIENCE_LOSING = 8
# The allowance is spent in lumps, so that the running mean of the loss swings around it.
ALLOWANCE_SWING = 1.5
# Rollouts of the first pause, of the longest, and of a trial between two.
FIRST_PAUSE, LONGEST_PAUSE = 16, 1024
TRIAL_ROLLOUTS = 8

# Optimiser steps below which a period of training is not worth what beginning and ending it costs.
MIN_STEPS = 2
# Rollouts for which features are of use.
FEATURE_LIFE_ROLLOUTS = 4
# Rollouts without training after which somebody should know why.
UNTRAINED_ROLLOUTS = 20


@dataclass(frozen=True)
class Plan:
    """
    What to do until the next account.

    Attributes:
        budget_s (`float`):
            Seconds to train for after the next rollout, beyond waits. 0.0: not at all.
        trains (`bool`):
            Whether to train at all, in waits too.
        captures (`bool`):
            Whether to copy hidden states.
        speculates (`bool`):
            Whether to draft.
    """

    budget_s: float = 0.0
    trains: bool = True
    captures: bool = True
    speculates: bool = True


@dataclass
class _Trend:
    """A running mean against the best so far; `None` before the first value."""

    mean: float | None = None
    best: float | None = None

    def follow(self, value: float) -> str | None:
        """`"rising"`, `"flat"` or `"fallen"`, the first time `None`; after a fall, the best is sought anew."""
        if self.mean is None or self.best is None:
            self.mean = self.best = value
            return None
        self.mean = 0.5 * (self.mean + value)
        if self.mean >= self.best * (1.0 + RISE):
            self.best = self.mean
            return "rising"
        if self.mean <= self.best * (1.0 - FALL):
            self.best = self.mean
            return "fallen"
        return "flat"


@dataclass
class _State:
    """All that changes."""

    rollouts: int = 0
    saved_s: float = 0.0  # running means
    spent_s: float = 0.0
    side_costs_s: float = 0.0
    step_s: float = 0.0  # of the last step
    total_net_s: float = 0.0  # since the run began
    is_paying: bool = False
    has_paid: bool = False  # since the last allowance
    first_ahead: bool = False  # whether the run has been ahead of one without speculation
    effort: float = FIRST_EFFORT
    flat: int = 0  # observations in a row
    allowance_left: int = ALLOWANCE_ROLLOUTS  # rollouts
    credit_s: float = 0.0
    earned_s: float = 0.0  # in the last rollout
    optimizer_step_s: float = 0.0
    observed_tokens: float = 0.0  # of the observation under way
    observed_length: float = 0.0  # sum over these tokens
    losing: int = 0  # rollouts in a row
    pause_left: int = 0  # rollouts; 0 outside a pause
    next_pause: int = FIRST_PAUSE
    is_trial: bool = False
    untrained: int = 0  # rollouts in a row
    was_starved: bool = False


def _mean(old: float, newest: float) -> float:
    return old + NEWEST_WEIGHT * (newest - old)


class PayBack:
    """
    Decides after every training rollout what training the drafter may cost, and whether to speculate at all.

    * Training and what goes with it (merging, pushing, copying hidden states) take at most half of what speculation
      saves. Where the expected acceptance no longer rises, the effort is halved at every observation; it doubles when
      acceptance rises, and returns to half when acceptance falls, because then the policy has moved.
    * While the drafter learns, at the start and after the policy has moved, a run may lose 1 % of each step, all costs
      of speculation included. This ends when the expected acceptance stops rising, or after 128 rollouts.
    * Training inside waits is free and is never cut, but it counts: what was trained there need not be paid for.
    * When speculation has cost more than it saved, and more than the allowance, for 8 rollouts in a row, the run goes
      on without it. It is tried again for 8 rollouts after 16, 32, 64 … rollouts.

    Args:
        max_share (`float`):
            Largest share of a step to spend on training outside of waits.
        trains_in_waits (`bool`):
            Whether there are waits to train in.
        has_prices (`bool`, *optional*, defaults to `True`):
            Whether savings are measured. Where they are not, because the selector has no opinion about "off", nothing
            pauses and training takes `max_share`, or 1 % where it also has waits.
    """

    def __init__(self, max_share: float, trains_in_waits: bool, has_prices: bool = True):
        self.max_share = max_share
        self.trains_in_waits = trains_in_waits
        self.has_prices = has_prices
        self.start_run()

    def start_run(self) -> None:
        """Begins anew: what another run has saved is spent."""
        self._state = _State()
        self._learning = _Trend()  # of the expected acceptance length on training batches
        self._drafting = _Trend()  # of the acceptance in rollouts
        self._news = ""
        self.plan = self._make_plan()

    def observe(self, account: StepAccount, policy_step: int) -> Plan:
        """
        Takes the account of a rollout and the step around it.

        Args:
            account ([`StepAccount`]):
                The same on all ranks.
            policy_step (`int`):
                Step of the policy, counted from 1, for what is said about it.

        Returns:
            [`Plan`]: The same on all ranks.
        """
        state = self._state
        state.rollouts += 1
        state.step_s = account.step_s
        state.was_starved = account.was_starved
        state.optimizer_step_s = account.optimizer_step_s
        state.untrained = 0 if account.tokens else state.untrained + 1
        state.saved_s = _mean(state.saved_s, account.saved_s)
        state.spent_s = _mean(state.spent_s, account.spent_s)
        state.side_costs_s = _mean(state.side_costs_s, account.side_costs_s)
        self._note_news(account, policy_step)
        if state.pause_left:
            state.pause_left -= 1
            if not state.pause_left:
                self._begin_trial()
        else:
            self._follow_drafter(account)
            self._judge()
        self._settle(account)
        self.plan = self._make_plan()
        return self.plan

    # ---- what was seen ---------------------------------------------------------------------------------------------

    @property
    def net_s(self) -> float:
        """Seconds that a step is shorter than without speculation, as a running mean."""
        return self._state.saved_s - self._state.spent_s

    @property
    def is_learning(self) -> bool:
        """Whether the run may lose time for its drafter to learn."""
        return self._state.allowance_left > 0

    @property
    def is_paused(self) -> bool:
        return self._state.pause_left > 0

    def _note_news(self, account: StepAccount, policy_step: int) -> None:
        state = self._state
        was_paying, was_behind = state.is_paying, state.total_net_s < 0.0
        state.total_net_s += account.net_s
        state.is_paying = self.net_s > 0.0
        state.has_paid = state.has_paid or state.is_paying
        self._news = ""
        if not self.has_prices:
            return
        if state.is_paying and not was_paying:
            self._news = f"; speculation starts to pay at step {policy_step}"
        if was_behind and state.total_net_s >= 0.0 and not state.first_ahead:
            state.first_ahead = True
            self._news += f"; ahead of a run without speculation from step {policy_step} on"

    def _follow_drafter(self, account: StepAccount) -> None:
        """Adapts effort and allowance to how the drafter's acceptance goes."""
        state = self._state
        trend = self._observe_learning(account)
        if account.first_acceptance is None:
            has_moved = trend == "fallen"
        else:
            # Batches repeat what is in the buffer, so a fall there may mean no more than new answers.
            has_moved = self._drafting.follow(account.first_acceptance) == "fallen"
        state.allowance_left = max(0, state.allowance_left - 1)
        if has_moved:
            state.effort, state.flat = MAX_EFFORT, 0
            # A drafter that has paid nothing since the last one has had its allowance.
            if state.has_paid and not state.is_trial:
                state.allowance_left, state.has_paid = ALLOWANCE_ROLLOUTS, False
        elif trend == "rising":
            state.effort, state.flat = min(MAX_EFFORT, 2.0 * state.effort), 0
        elif trend is not None:
            state.effort, state.flat = max(MIN_EFFORT, 0.5 * state.effort), state.flat + 1
            if state.flat >= PATIENCE_FLAT:
                state.allowance_left = 0

    def _observe_learning(self, account: StepAccount) -> str | None:
        """How the expected acceptance goes, where enough was trained since it was asked last."""
        state = self._state
        if account.expected_length is None:
            return None
        state.observed_tokens += account.tokens
        state.observed_length += account.tokens * account.expected_length
        if state.observed_tokens < TOKENS_PER_OBSERVATION:
            return None
        trend = self._learning.follow(state.observed_length / state.observed_tokens)
        state.observed_tokens = state.observed_length = 0.0
        return trend

    # ---- what follows from it --------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Pauses speculation that costs more than it brings."""
        state = self._state
        if not self.has_prices:
            return
        if state.is_trial and not self.is_learning:
            state.is_trial = False
            if not state.is_paying:
                return self._pause()
            state.next_pause = FIRST_PAUSE
        allowed_s = ALLOWANCE_SWING * ALLOWANCE_SHARE * state.step_s if self.is_learning else 0.0
        state.losing = state.losing + 1 if self.net_s < -allowed_s else 0
        if state.losing >= PATIENCE_LOSING:
            self._pause()

    def _pause(self) -> None:
        state = self._state
        state.pause_left, state.next_pause = state.next_pause, min(LONGEST_PAUSE, 2 * state.next_pause)
        state.losing, state.allowance_left, state.is_trial = 0, 0, False

    def _begin_trial(self) -> None:
        """Speculates again as if the run began; the policy is another one by now."""
        state = self._state
        state.is_trial, state.allowance_left, state.effort, state.flat = True, TRIAL_ROLLOUTS, FIRST_EFFORT, 0
        state.saved_s = state.spent_s = state.side_costs_s = 0.0
        self._learning, self._drafting = _Trend(), _Trend()

    def _settle(self, account: StepAccount) -> None:
        """Adds what the next training may cost to what was left of the last one."""
        state = self._state
        credit_s = state.credit_s - account.training_s
        # What was trained for nothing need not be trained again, but leaves no debt.
        credit_s = min(credit_s, max(0.0, credit_s - account.free_s))
        # Time in which there was nothing to train on must not come back as one long stop.
        state.earned_s = 0.0 if self.is_paused else self._earned_s()
        state.credit_s = state.earned_s + (0.0 if account.was_starved or self.is_paused else credit_s)

    def _earned_s(self) -> float:
        state = self._state
        most_s = self.max_share * state.step_s
        if not self.has_prices:
            return min(most_s, ALLOWANCE_SHARE * state.step_s) if self.trains_in_waits else most_s
        saved_s, side_costs_s = max(0.0, state.saved_s), state.side_costs_s
        earned_s = min(state.effort * saved_s, MAX_EFFORT * saved_s - side_costs_s)
        if self.is_learning:
            earned_s = max(earned_s, ALLOWANCE_SHARE * state.step_s + min(0.0, state.saved_s) - side_costs_s)
        return min(max(0.0, earned_s), most_s)

    def _make_plan(self) -> Plan:
        state = self._state
        if self.is_paused:
            return Plan(trains=False, captures=False, speculates=False)
        needed_s = MIN_STEPS * state.optimizer_step_s
        budget_s = state.credit_s if self.max_share and state.credit_s > needed_s else 0.0
        # There is nothing to judge by before the first account.
        is_near = state.credit_s + FEATURE_LIFE_ROLLOUTS * state.earned_s > needed_s or not state.rollouts
        return Plan(budget_s, captures=self.trains_in_waits or (self.max_share > 0.0 and is_near))

    # ---- what is told ----------------------------------------------------------------------------------------------

    def why_untrained(self) -> str:
        """Why nothing was trained for many rollouts; empty where something was, or need not be."""
        state = self._state
        has_learned = state.flat >= PATIENCE_FLAT
        if state.untrained < UNTRAINED_ROLLOUTS or self.is_paused or has_learned:
            return ""
        since = f"Nothing was trained for {state.untrained} rollouts: "
        if state.was_starved:
            return since + "there were no hidden states to train on."
        if not self.max_share:
            return since + "`drafter_time_budget=0` leaves waits only, and no rank waited long enough."
        needed = f"{MIN_STEPS} optimiser steps take {MIN_STEPS * state.optimizer_step_s:.3g} s"
        return since + f"{needed}, and what speculation saves pays for {state.earned_s:.3g} s a rollout."

    def metrics(self, account: StepAccount) -> dict[str, float]:
        """What the account says, and what was decided on it."""
        state = self._state
        return {
            "tlt/payback/saved_s": account.saved_s,
            "tlt/payback/spent_s": account.spent_s,
            "tlt/payback/net_s": account.net_s,
            "tlt/payback/total_net_s": state.total_net_s,
            "tlt/payback/step_s": account.step_s,
            "tlt/payback/step_share": self.net_s / state.step_s if state.step_s else 0.0,
            "tlt/payback/budget_s": self.plan.budget_s,
            "tlt/payback/effort": 0.0 if self.is_paused else state.effort,
            "tlt/payback/learning": float(self.is_learning),
            "tlt/payback/paused": float(self.is_paused),
        }

    def verdict(self) -> str:
        """In a few words."""
        state = self._state
        if self.is_paused:
            return f"paused, next try in {state.pause_left} rollouts"
        if not self.has_prices:
            return "not measured, the selector predicts nothing"
        if state.is_paying:
            return "paying"
        if state.is_trial:
            return "trying again"
        if self.is_learning:
            return "the drafter learns" if state.earned_s else "does not pay yet"
        return "costs more than it saves"

    def describe(self) -> str:
        """
        One line on the last account.

        Example: `pay-back: +0.52 s a step (+3.9 %; saves 0.81 s, costs 0.29 s), paying`
        """
        state = self._state
        share = 100.0 * self.net_s / state.step_s if state.step_s else 0.0
        numbers = f"{share:+.1f} %; saves {state.saved_s:.3g} s, costs {state.spent_s:.3g} s"
        return f"pay-back: {self.net_s:+.3g} s a step ({numbers}), {self.verdict()}{self._news}"

    # ---- resuming --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": asdict(self._state),
            "learning": asdict(self._learning),
            "drafting": asdict(self._drafting),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with what `state_dict` returned."""
        self._state = _State(**state["state"])
        self._learning, self._drafting = _Trend(**state["learning"]), _Trend(**state["drafting"])
        self.plan = self._make_plan()
