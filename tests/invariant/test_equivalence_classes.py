"""
Configurations that must train the same policy, recorded by running both: no stored numbers.

Sampled tokens depend on the drafter draw by draw, though not in distribution. Where two runs are compared bit for bit,
the rollouts are therefore either without draft tokens or with a drafter whose training is not pushed.
"""

import pytest
import torch
from datasets import Dataset
from tests.tolerance import assert_close, forward_operations, logprob_tolerance
from transformers import TrainerCallback

from tlt_trl import TLTGRPOConfig, TLTGRPOTrainer
from tlt_trl.strategy import FixedSelector, Strategy


pytest.importorskip("vllm")
pytestmark = pytest.mark.engine


def dataset(count=32):
    return Dataset.from_list([{"prompt": f"w{5 + i % 40} w{9 + i % 20} w7"} for i in range(count)])


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


class RecordGradients(TrainerCallback):
    """Copies of the policy's gradients before every optimiser step."""

    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])


def make_trainer(policy_dir, output_dir, callbacks=None, **kwargs):
    defaults = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 16,
        "max_steps": 3,
        "seed": 5,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 64,
        "vllm_engine_kwargs": {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 2**27},
        "speculation_selector": "fixed",
    }
    if kwargs.get("drafter_training", True):
        defaults["drafter_time_budget"] = 0.9
    args = TLTGRPOConfig(str(output_dir), **(defaults | kwargs))
    return TLTGRPOTrainer(policy_dir, reward, args, dataset(), dataset(8), callbacks=callbacks)


@pytest.fixture(scope="module")
def trained(make_tiny_policy, tmp_path_factory):
    """A trainer after three steps with a bandit, with draft tokens and drafter training."""
    policy_dir = make_tiny_policy(tmp_path_factory.mktemp("policy"))
    trainer = make_trainer(policy_dir, tmp_path_factory.mktemp("output"), speculation_selector="beg_mab")
    trainer.train()
    return trainer


@pytest.mark.parametrize("draft_tokens", ["none, drafter pushed", "three, drafter kept back"])
def test_drafter_training_on_equals_off(tiny_policy_dir, tmp_path, monkeypatch, draft_tokens):
    # A threshold of 0 running requests means no draft tokens at all.
    options = {"speculation_activation_threshold": 0} if draft_tokens.startswith("none") else {}

    def run(drafter_training):
        record = RecordGradients()
        trainer = make_trainer(tiny_policy_dir, tmp_path, [record], drafter_training=drafter_training, **options)
        if draft_tokens.startswith("three"):
            monkeypatch.setattr(trainer.vllm_generation.engine, "push_drafter", lambda weights, verify: None)
        trainer.train()
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert bool(trainer.online_drafter.steps) == drafter_training
        assert any(log["tlt/draft_tokens/proposed"] for log in logs) == draft_tokens.startswith("three")
        weights = [p.detach().clone() for p in trainer.model.parameters()]
        return (
            record.gradients,
            weights,
            [(log["loss"], log["reward"], log["completions/mean_length"]) for log in logs],
        )

    with_training, without = run(True), run(False)
    assert len(without[0]) == 3 and any(gradient.abs().max() > 0 for gradient in without[0][0])
    for step_with, step_without in zip(with_training[0], without[0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(step_with, step_without, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(with_training[1], without[1], strict=True))
    assert with_training[2] == without[2]


def test_drafter_training_leaves_the_random_states_alone(trained):
    import random

    import numpy as np

    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    trainer, generation = trained.online_drafter.trainer, trained.vllm_generation
    steps = trainer.steps
    trainer.set_policy(generation.policy_embedding, generation.policy_lm_head)
    trainer.train_for(1.0)
    assert trainer.steps > steps
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_log_probs_and_importance_ratios_with_speculation_equal_those_without(trained):
    # The same tokens: sampled with draft tokens, scored by the engine without, and by the policy that is trained.
    speculative, plain = trained.vllm_generation.engine.speculative_and_plain_logprobs(list(range(4, 12)))
    assert len(speculative) == 96
    assert_close(speculative, plain, forward_operations(trained.model.config, num_tokens=32))


@pytest.mark.parametrize(
    ("threshold", "tied"),
    [
        (None, True),
        (None, False),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(0, False, marks=pytest.mark.slow),
    ],
)
def test_importance_ratios_are_one(make_tiny_policy, tmp_path, threshold, tied):
    # float32 engine and policy hold the same weights when a rollout is scored, with and without draft tokens. The
    # drafter was made from the policy, with the same head: pushing its own must not change the policy's.
    policy_dir = make_tiny_policy(tmp_path / "policy", tied=tied)
    trainer = make_trainer(policy_dir, tmp_path, speculation_activation_threshold=threshold)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 3
    limit = logprob_tolerance()
    for log in logs:
        assert (log["tlt/draft_tokens/proposed"] > 0) == (threshold is None)
        assert log["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=limit)
        assert log["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=limit)
        assert log["sampling/sampling_logp_difference/max"] < limit


def test_sync_twice_equals_once(trained, monkeypatch):
    from vllm import SamplingParams

    generation = trained.vllm_generation
    # A bandit's choices differ from pass to pass, the verified shapes with them, and so the last bit of a log-prob.
    monkeypatch.setattr(generation.rollout_loop, "selector", FixedSelector(Strategy("eagle3", 3)))

    def observe():
        prompts = [{"prompt_token_ids": [4 + i, 9, 10]} for i in range(8)]
        params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True)
        outputs = generation.llm.generate(prompts, params, use_tqdm=False)
        assert generation.rollout_loop.pop_stats().speculative_steps
        return [
            (list(o.outputs[0].token_ids), [next(iter(p.values())).logprob for p in o.outputs[0].logprobs])
            for o in outputs
        ]

    generation.sync_weights()
    once = observe()
    generation.sync_weights()
    assert observe() == once
    assert generation.alarms.active["drafter_mismatch"] is False


def test_evaluation_does_not_touch_buffer_or_drafter(trained):
    def observe():
        # What was sampled for training, and what the drafter has become.
        samples = trained.online_drafter.buffer.samples
        tokens = [sample.input_ids.tolist() for sample in samples]
        drafter = {name: tensor.clone() for name, tensor in trained.drafter.state_dict().items()}
        return tokens, trained.online_drafter.steps, drafter

    before = observe()
    assert before[0]
    metrics = trained.evaluate()
    assert "eval_reward" in metrics
    after = observe()
    assert after[:2] == before[:2]
    assert all(torch.equal(after[2][name], tensor) for name, tensor in before[2].items())
