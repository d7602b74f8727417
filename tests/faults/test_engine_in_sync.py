"""
Kind of fault: the engine is matched to the policy by the number of the step, and weights change without a step.

Every rollout is judged by TRL's own figure: the largest difference between the log-probs that came with the tokens,
which are the engine's, and those that the policy gives them right after.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from tests.conftest import save_tiny_policy
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward
from tests.tolerance import logprob_tolerance
from transformers import TrainerCallback
from vllm import SamplingParams

from tlt_trl import TLTGRPOTrainer
from tlt_trl.generation.speculative_generation import SpeculativeVLLMGeneration


pytestmark = pytest.mark.engine
DIFFERENCE = "sampling/sampling_logp_difference/max"


def make_trainer(folder, peft_config=None, **kwargs):
    policy = save_tiny_policy(folder / "policy", num_layers=2)
    options = {"max_steps": 2, "per_device_eval_batch_size": 4, "drafter_training": False} | kwargs
    args = colocated_arguments(folder / "run", **options)
    return TLTGRPOTrainer(policy, text_reward, args, prompts(16), eval_dataset=prompts(2), peft_config=peft_config)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A trainer after two steps of which the first is the best, and which it has loaded at the end."""
    trainer = make_trainer(
        tmp_path_factory.mktemp("full"),
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="num_tokens",  # grows: the first checkpoint is the best
        greater_is_better=False,
    )
    trainer.train()
    assert trainer.state.best_global_step == 1
    return trainer


@pytest.fixture(scope="module")
def lora_trainer(tmp_path_factory):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer = make_trainer(tmp_path_factory.mktemp("lora"), adapter, max_steps=1)
    trainer.train()
    trainer.model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    by_hand(trainer.model)
    return trainer


def difference(trainer):
    """Of the rollouts of one evaluation."""
    trainer.evaluate()
    return trainer.state.log_history[-1][f"eval_{DIFFERENCE}"]


def is_in_sync(trainer):
    return difference(trainer) < logprob_tolerance()


@pytest.fixture(params=[True, False], ids=["mark", "step number"])
def is_matched(request, monkeypatch):
    """Whether the policy's mark decides; where the number of the step does, every test here shows the fault."""
    if not request.param:
        monkeypatch.setattr(SpeculativeVLLMGeneration, "holds_policy", lambda generation: True)
    return request.param


@torch.no_grad()
def in_place(policy):
    for parameter in policy.parameters():
        parameter.mul_(1.1)


def load_state_dict(policy):
    policy.load_state_dict({name: 0.9 * tensor for name, tensor in policy.state_dict().items()})


def load_checkpoint(policy):
    # The checkpoint of the second step, by hand.
    run = Path(policy.name_or_path).parent / "run"
    policy.load_state_dict(load_file(run / "checkpoint-2" / "model.safetensors"), strict=False)


@torch.no_grad()
def through_data(policy):
    for parameter in policy.parameters():
        parameter.data.mul_(1.2)  # autograd's counter does not see it


@torch.no_grad()
def other_memory(policy):
    for parameter in policy.parameters():
        parameter.data = 0.8 * parameter  # as `vector_to_parameters` does; the counter stays as it is


class ChangeAfterEvaluation(TrainerCallback):
    """TRL has then pushed what that step began with, and generates again for the same step."""

    def on_evaluate(self, args, state, control, model, **kwargs):
        in_place(model)


def interrupted(weights, after):
    """Other weights than the policy's, and no more of them than `after`."""
    for number, (name, weight) in enumerate(weights):
        if number == after:
            raise KeyboardInterrupt
        yield name, 2 * weight


class TestEngineInSync:
    def test_evaluation_of_the_best_model(self, trainer, is_matched):
        trainer.train()  # four steps in all, each beginning with what the run before left behind
        assert trainer.state.best_global_step == 1
        assert is_in_sync(trainer) == is_matched

    @pytest.mark.parametrize("change", [in_place, load_state_dict, load_checkpoint, through_data, other_memory])
    def test_weights_that_change_without_a_step(self, trainer, is_matched, change):
        trainer.vllm_generation.sync_weights()
        change(trainer.model)
        assert is_in_sync(trainer) == is_matched

    def test_every_rollout_of_a_second_run(self, trainer, is_matched):
        trainer.vllm_generation.sync_weights()
        trainer.state.log_history.clear()
        callback = ChangeAfterEvaluation()
        trainer.add_callback(callback)
        trainer.train()
        trainer.remove_callback(callback)
        differences = [log[DIFFERENCE] for log in trainer.state.log_history if DIFFERENCE in log]
        assert len(differences) == 2
        assert (max(differences) < logprob_tolerance()) == is_matched

    def test_resuming_in_the_same_process(self, trainer, is_matched):
        trainer.vllm_generation.sync_weights()
        in_place(trainer.model)
        trainer.state.log_history.clear()
        trainer.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-1"))
        differences = [log[DIFFERENCE] for log in trainer.state.log_history if DIFFERENCE in log]
        assert max(differences) < logprob_tolerance()
        assert is_in_sync(trainer) == is_matched  # the best model again

    def test_weights_swapped_for_an_evaluation(self, trainer, is_matched):
        # As callbacks do that evaluate an average of the weights.
        trainer.vllm_generation.sync_weights()
        own = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        trainer.model.load_state_dict({name: 0.9 * tensor for name, tensor in own.items()})
        during = is_in_sync(trainer)
        trainer.model.load_state_dict(own)
        assert [during, is_in_sync(trainer)] == [is_matched, True]

    def test_greedy_text_is_the_policys(self, trainer, is_matched):
        trainer.vllm_generation.sync_weights()
        other_memory(trainer.model)
        trainer.evaluate()
        prompt = [5, 9, 7]
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        (output,) = trainer.vllm_generation.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        wanted = trainer.model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=3
        )
        assert (list(output.outputs[0].token_ids) == wanted[0, len(prompt) :].tolist()) == is_matched

    def test_a_push_that_was_interrupted_is_made_again(self, trainer, monkeypatch):
        generation = trainer.vllm_generation
        generation.sync_weights()
        push = generation.engine.push_policy
        monkeypatch.setattr(
            generation.engine, "push_policy", lambda weights, verify: push(interrupted(weights, after=9), verify)
        )
        with pytest.raises(KeyboardInterrupt):
            generation.sync_weights()
        monkeypatch.undo()
        # The policy is what it was at the last whole push.
        assert is_in_sync(trainer)

    def test_an_unchanged_policy_is_not_pushed_again(self, trainer, monkeypatch):
        trainer.evaluate()
        pushes = []
        monkeypatch.setattr(trainer.vllm_generation.engine, "push_policy", lambda *args, **kw: pushes.append(args))
        assert is_in_sync(trainer) and not pushes


@torch.no_grad()
def by_hand(policy):
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0.0, 0.5)


def another_adapter(policy):
    policy.set_adapter("other" if policy.active_adapter == "default" else "default")


class TestAdaptersInSync:
    @pytest.mark.parametrize("change", [by_hand, another_adapter])
    def test_adapters_that_change_without_a_step(self, lora_trainer, is_matched, change):
        lora_trainer.vllm_generation.sync_weights()
        change(lora_trainer.model)
        assert is_in_sync(lora_trainer) == is_matched

    def test_the_base_model_while_adapters_are_disabled(self, lora_trainer, is_matched):
        by_hand(lora_trainer.model)
        assert is_in_sync(lora_trainer) == is_matched
        lora_trainer.vllm_generation.sync_weights()
        with lora_trainer.model.disable_adapter():
            assert is_in_sync(lora_trainer) == is_matched
        assert is_in_sync(lora_trainer)

    def test_adapters_are_taken_out_after_an_interrupted_push(self, lora_trainer, monkeypatch):
        generation = lora_trainer.vllm_generation
        push = generation.engine.push_policy
        monkeypatch.setattr(
            generation.engine, "push_policy", lambda weights, verify: push(interrupted(weights, after=9), verify)
        )
        with pytest.raises(KeyboardInterrupt):
            generation.sync_weights()
        monkeypatch.undo()
        assert not lora_trainer.model.get_model_status().merged_adapters
        assert is_in_sync(lora_trainer)
