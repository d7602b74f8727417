"""The tiny policies and samples of the drafter's tests, and a drafter that is trained online."""

from types import SimpleNamespace

import pytest
from tests.drafter.conftest import fill_buffer, make_drafter, make_policy, make_sample, policy  # noqa: F401

from tlt_trl.drafter import DrafterTrainingArguments, FeatureBuffer
from tlt_trl.drafter.pass_to_record import PassToRecord
from tlt_trl.idle.payback import PayBack
from tlt_trl.idle.step_clock import StepClock
from tlt_trl.online_drafter import OnlineDrafter


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def one_process(gather=lambda tensor: tensor):
    """What is asked of accelerate in a run of a single process."""
    return SimpleNamespace(
        device="cpu",
        num_processes=1,
        process_index=0,
        local_process_index=0,
        is_main_process=True,
        gather=gather,
        reduce=lambda tensor, reduction: tensor,
        wait_for_everyone=lambda: None,
    )


def rollout(online, clock, seconds=1.0):
    """A step that earns the drafter its share of these seconds, then a rollout after which it trains."""
    online.start_rollout(0)
    clock.now_s += seconds
    metrics = online.pop_metrics()
    online.train_after_rollout()
    return metrics


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make_online(policy, make_drafter, clock):  # noqa: F811
    """
    An [`OnlineDrafter`] of one process, without features unless a buffer is given, that may train for a share of the
    time.
    """

    def make(buffer=None, drafter=None, share=0.5, gather=None, **kwargs):
        heads = policy.get_input_embeddings().weight.detach(), policy.get_output_embeddings().weight.detach()
        return OnlineDrafter(
            make_drafter() if drafter is None else drafter,
            policy,
            one_process() if gather is None else one_process(gather),
            DrafterTrainingArguments(unroll_steps=2, max_tokens_per_step=100),
            FeatureBuffer(10_000) if buffer is None else buffer,
            **{
                "policy_copy": lambda: heads,
                "pass_to_record": PassToRecord(1, 1, 1, corrects_importance=True),
                "payback": PayBack(share, trains_in_waits=False, has_prices=False),
                "step_clock": StepClock(clock),
            }
            | kwargs,
        )

    return make
