"""
The controller on accounts recorded from 40 steps of a real run: a random policy of two layers on one core, without a
drafter to begin with, whose steps of 80 ms have nothing to gain from speculation.
"""

import json
from pathlib import Path

import pytest

from tlt_trl.idle.payback import PayBack
from tlt_trl.idle.step_account import StepAccount


ACCOUNTS = [StepAccount(**row) for row in json.loads(Path(__file__).with_name("recorded.json").read_text())]


def test_decisions_and_loss():
    payback, paused, net_s = PayBack(0.1, trains_in_waits=False), [], 0.0
    for step, account in enumerate(ACCOUNTS, start=1):
        net_s += account.net_s
        payback.observe(account, step)
        paused += [step] * payback.is_paused
    # After 8 rollouts, then again after a trial of 8.
    assert paused == [*range(8, 24), *range(32, 41)]
    assert payback.verdict() == "paused, next try in 24 rollouts"
    metrics = payback.metrics(ACCOUNTS[-1])
    assert metrics["tlt/payback/total_net_s"] == pytest.approx(net_s)
    # Pushing the drafter alone takes 5 % of such a step, so the loss is more than the allowance until the pause, and
    # next to nothing is left for training: one optimiser step as the trial begins.
    trained = [step for step, account in enumerate(ACCOUNTS, start=1) if account.training_s]
    assert trained == [25]
    assert net_s == pytest.approx(sum(account.net_s for account in ACCOUNTS[:8] + ACCOUNTS[24:32]), abs=5e-3)
    assert net_s == pytest.approx(-0.080647) and -net_s < 0.03 * sum(account.step_s for account in ACCOUNTS)
