"""
Kind of fault: what is set for the engine alone is not seen by what learns from it. Here the temperature, which
`generation_kwargs` or a `rollout_func` may set apart from the config's.
"""

import pytest
from tests.conftest import save_tiny_policy
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward
from vllm import SamplingParams

from tlt_trl import TLTGRPOTrainer
from tlt_trl.online_drafter import MIN_TEMPERATURE


pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"), num_layers=2)


def make_trainer(policy, folder, rollout_func=None, **kwargs):
    args = colocated_arguments(folder, **{"max_steps": 1, "per_device_eval_batch_size": 4} | kwargs)
    return TLTGRPOTrainer(policy, text_reward, args, prompts(16), eval_dataset=prompts(2), rollout_func=rollout_func)


def rollouts_at(*temperatures):
    """A `rollout_func` whose samples have temperatures of their own, in turn."""

    def rollout(prompts, trainer):
        params = [
            SamplingParams(max_tokens=6, temperature=temperatures[i % len(temperatures)], logprobs=0)
            for i in range(len(prompts))
        ]
        outputs = trainer.vllm_generation.llm.generate(prompts, params, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        return {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [list(answer.token_ids) for answer in answers],
            "logprobs": [[next(iter(token.values())).logprob for token in answer.logprobs] for answer in answers],
        }

    return rollout


class TestTemperature:
    def test_of_generation_kwargs(self, policy, tmp_path):
        trainer = make_trainer(policy, tmp_path, generation_kwargs={"temperature": 0.6})
        assert trainer.online_drafter.trainer.temperature == 1.0
        trainer.train()
        assert trainer.online_drafter.trainer.temperature == 0.6

    def test_of_the_config(self, policy, tmp_path):
        trainer = make_trainer(policy, tmp_path, temperature=0.8)
        trainer.train()
        assert trainer.online_drafter.trainer.temperature == 0.8

    def test_of_most_requests_of_a_rollout_func(self, policy, tmp_path):
        trainer = make_trainer(policy, tmp_path, rollouts_at(0.7, 0.7, 1.0))
        trainer.train()
        assert trainer.online_drafter.trainer.temperature == 0.7

    def test_greedy_answers_leave_the_labels_finite(self, policy, tmp_path):
        # With a fixed strategy, training need not be paid for by what such a policy saves.
        options = {"speculation_selector": "fixed", "max_steps": 3, "drafter_time_budget": 0.9}
        trainer = make_trainer(policy, tmp_path, rollouts_at(0.0), **options)
        trainer.train()
        assert trainer.online_drafter.trainer.temperature == MIN_TEMPERATURE
        losses = [log["tlt/drafter/loss"] for log in trainer.state.log_history if "tlt/drafter/loss" in log]
        assert losses and all(0.0 <= loss < 1e3 for loss in losses)

    def test_what_is_sampled_outside_of_rollouts_is_not_learnt(self, policy, tmp_path):
        # As a callback does that shows greedy answers. The check at start-up samples more often than a rollout, too.
        trainer = make_trainer(policy, tmp_path)
        trainer.vllm_generation.llm.generate(["w5 w9"] * 40, SamplingParams(temperature=0.0), use_tqdm=False)
        trainer.train()
        assert trainer.online_drafter.trainer.temperature == 1.0
