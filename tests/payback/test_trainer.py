"""What the trainer makes of the controller's decisions, with the real engine."""

import logging

import pytest
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward

from tlt_trl import TLTGRPOTrainer


pytestmark = pytest.mark.engine

PAYING_STEPS, STEPS = 8, 32


def engine_pushes(trainer):
    """A list that grows with every push of the drafter."""
    pushes, push = [], trainer.vllm_generation.engine.push_drafter

    def counting(*args, **kwargs):
        pushes.append(trainer.state.global_step)
        return push(*args, **kwargs)

    trainer.vllm_generation.engine.push_drafter = counting
    return pushes


@pytest.fixture(scope="module")
def run(make_tiny_policy, tmp_path_factory):
    """A run whose rollouts save much in the first steps and lose much in the others, whatever they really do."""
    policy = make_tiny_policy(tmp_path_factory.mktemp("policy"), num_layers=2)
    args = colocated_arguments(tmp_path_factory.mktemp("output"), max_steps=STEPS, drafter_time_budget=0.5)
    trainer = TLTGRPOTrainer(policy, text_reward, args, prompts())
    online, pushes, added = trainer.online_drafter, engine_pushes(trainer), []
    note_rollout = online.note_rollout

    def note_invented_savings(metrics):
        added.append(online.buffer.num_added)
        saved_s = 10.0 if trainer.state.global_step < PAYING_STEPS else -100.0
        drafts = metrics["tlt/speculation_share"] > 0
        note_rollout(metrics | {"tlt/speculation/saved_s": saved_s if drafts or saved_s > 0 else 0.0})

    online.note_rollout = note_invented_savings
    # Speculation always, so that it is the pay-back that switches it off.
    trainer.vllm_generation.rollout_loop.selector.select = lambda *_: args.strategies[2]
    logger, lines = logging.getLogger("tlt_trl.tlt_grpo_trainer"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    args.disable_tqdm = True
    trainer.train()
    logger.removeHandler(handler)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return logs, lines, pushes, added, trainer


def test_a_drafter_that_pays_is_trained_pushed_and_used(run):
    logs, lines, pushes, added, _ = run
    paying = logs[:PAYING_STEPS]
    assert all(log["tlt/payback/saved_s"] == 10.0 and log["tlt/payback/paused"] == 0.0 for log in paying)
    assert all(log["tlt/draft_tokens/proposed"] > 0 for log in paying)
    assert sum(log["tlt/drafter/steps"] for log in paying) > 0 and added[PAYING_STEPS] > 0
    # What training cost is in the account, and the drafter is pushed again once it was trained.
    assert sum(log["tlt/payback/spent_s"] for log in paying) >= sum(log["tlt/drafter/time_s"] for log in paying) > 0
    assert 1 < len([step for step in pushes if step < PAYING_STEPS]) <= PAYING_STEPS
    assert any("speculation starts to pay at step 1" in line for line in lines)


def test_a_run_that_loses_goes_on_plain(run):
    logs, lines, pushes, added, trainer = run
    paused = [step for step, log in enumerate(logs) if log["tlt/payback/paused"]]
    assert paused[0] > PAYING_STEPS and paused == list(range(paused[0], STEPS))[: len(paused)] and len(paused) > 8
    # What is decided at the end of a step holds from the next one on; one more push brings what was trained before.
    for log in logs[paused[1] :]:
        if not log["tlt/payback/paused"]:
            break
        assert log["tlt/speculation_share"] == log["tlt/drafter/steps"] == log["tlt/feature_capture_s"] == 0.0
        assert log["tlt/alarm/not_paying"] == 1.0
    assert len(set(added[paused[1] : paused[-1]])) == 1
    assert not [step for step in pushes if paused[1] < step <= paused[-1]]
    assert any("paused, next try in 16 rollouts" in line for line in lines)


def test_another_run_of_the_trainer_begins_afresh(run):
    *_, trainer = run
    trainer.online_drafter.start_run()
    assert "not_paying" not in trainer.vllm_generation.rollout_loop.disabled
    assert trainer.online_drafter.payback.plan.speculates
