"""Kind of fault: a reward function that forks while the drafter is trained in a thread."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest
from tests.drafter.conftest import fill_buffer, make_drafter, make_policy, make_sample, policy  # noqa: F401

from tlt_trl.drafter import DrafterTrainer, DrafterTrainingArguments
from tlt_trl.idle.spot_training import MAX_STEP_S, BackgroundTraining, train_safely


DEADLINE_S = 60


def in_a_forked_process():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map_async(abs, [-1, -2]).get(timeout=DEADLINE_S) == [1, 2]


def in_a_child_that_ends_at_once():
    child = os.fork()
    if not child:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def in_a_program():
    done = subprocess.run([sys.executable, "-c", "print(6)"], capture_output=True, timeout=DEADLINE_S, check=True)
    return done.stdout == b"6\n"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("reward", [in_a_forked_process, in_a_child_that_ends_at_once, in_a_program])
def test_a_reward_that_forks_ends_and_training_goes_on(make_drafter, fill_buffer, policy, reward):  # noqa: F811
    trainer = DrafterTrainer(make_drafter(), fill_buffer(), DrafterTrainingArguments(unroll_steps=3))
    heads = policy.get_input_embeddings().weight.detach(), policy.get_output_embeddings().weight.detach()
    reports = []
    background = BackgroundTraining(
        lambda stop: train_safely(trainer, heads, stop=stop, max_step_s=MAX_STEP_S), reports.append
    )
    with background.running():
        deadline_s = time.monotonic() + DEADLINE_S
        while not trainer.steps and time.monotonic() < deadline_s:
            time.sleep(0.01)
        before = trainer.steps
        assert before and reward()
        while trainer.steps == before and time.monotonic() < deadline_s:
            time.sleep(0.01)
    (report,) = reports
    assert report.failures == 0.0 and report.steps == trainer.steps > before
