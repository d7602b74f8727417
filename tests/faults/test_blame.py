"""Kind of fault: the message names the engine, the version or torch where the user's own state is the cause."""

import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from tests.conftest import save_tiny_policy
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward
from transformers import AutoModelForCausalLM, TrainerCallback

from tlt_trl import TLTGRPOTrainer
from tlt_trl.vllm_internals.weights import NonFinitePolicyError


pytestmark = pytest.mark.engine


def make_trainer(folder, policy=None, reward=text_reward, peft_config=None, **kwargs):
    policy = save_tiny_policy(folder / "policy", num_layers=2) if policy is None else policy
    options = {"max_steps": 3, "per_device_eval_batch_size": 4, "drafter_training": False} | kwargs
    args = colocated_arguments(folder / "run", **options)
    return TLTGRPOTrainer(policy, reward, args, prompts(16), eval_dataset=prompts(2), peft_config=peft_config)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def lora_trainer(tmp_path_factory):
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return make_trainer(tmp_path_factory.mktemp("lora"), peft_config=adapter)


@pytest.fixture
def whole(trainer):
    """The trainer; a test may break its policy."""
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    yield trainer
    trainer.model.load_state_dict(weights)


class BreakAfter(TrainerCallback):
    """Makes a weight NaN when that step is done."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step == self.step:
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")


class BreakGradientOf(TrainerCallback):
    """Lets the optimiser break the policy in that step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == self.step - 1:
            self.hook = model.model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * torch.nan)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.hook.remove()


def message_of_run(trainer, callback):
    trainer.add_callback(callback)
    try:
        with pytest.raises(NonFinitePolicyError) as error:
            trainer.train()
    finally:
        trainer.remove_callback(callback)
    return str(error.value)


class TestBlame:
    def test_one_nan_is_found_with_its_weight_and_step(self, whole):
        message = message_of_run(whole, BreakAfter(step=2))
        assert "model.layers.1.mlp.up_proj.weight" in message and "global step 2" in message
        assert "callback" in message  # no loss and no gradient was broken
        assert "vLLM" not in message and "report" not in message

    def test_a_broken_gradient_is_named_with_the_step_of_its_log(self, whole):
        message = message_of_run(whole, BreakGradientOf(step=2))
        assert "global step 2" in message and "not finite is that of step 2" in message
        assert "max_grad_norm" in message and "checkpoint" in message

    def test_infinity_before_any_step_is_not_called_divergence(self, whole):
        whole.state.global_step = 0
        with torch.no_grad():
            whole.model.model.embed_tokens.weight[7, 0] = float("inf")
        with pytest.raises(NonFinitePolicyError, match=r"embed_tokens.*No optimiser step.*loaded like this"):
            whole.evaluate()

    def test_a_broken_adapter_is_named_and_leaves_the_base_model_alone(self, lora_trainer):
        policy = lora_trainer.model
        base = {name: p.detach().clone() for name, p in policy.named_parameters() if policy.prefix not in name}
        name, adapter = next((name, p) for name, p in policy.named_parameters() if "lora_B" in name)
        with torch.no_grad():
            adapter[0, 0] = float("nan")
        with pytest.raises(NonFinitePolicyError, match=re.escape(name)):
            lora_trainer.evaluate()
        assert all(torch.equal(p, base[name]) for name, p in policy.named_parameters() if name in base)
        # With a good adapter the same process goes on.
        with torch.no_grad():
            adapter.zero_()
        lora_trainer.evaluate()

    def test_resized_embeddings_are_named_with_both_sizes(self, tmp_path):
        policy = AutoModelForCausalLM.from_pretrained(save_tiny_policy(tmp_path / "policy"))
        policy.resize_token_embeddings(72)
        with pytest.raises(ValueError, match=r"72 rows.*has 64.*save_pretrained"):
            make_trainer(tmp_path, policy)

    def test_a_context_of_32_tokens(self, tmp_path):
        trainer = make_trainer(tmp_path, vllm_max_model_length=32, max_steps=1)
        trainer.train()
        assert trainer.state.log_history[0]["tlt/rollout/tokens"] > 0

    def test_a_context_too_short_to_check_says_so(self, tmp_path, caplog):
        trainer = make_trainer(tmp_path, vllm_max_model_length=12, max_completion_length=4, max_steps=1)
        trainer.train()
        assert "a context of 12 tokens is too short" in caplog.text

    def test_a_context_shorter_than_a_draft(self, tmp_path):
        with pytest.raises(ValueError, match=r"5 draft tokens do not fit into a context of 5 tokens.*`vllm_max_model"):
            make_trainer(tmp_path, vllm_max_model_length=5, max_completion_length=2)

    def test_resuming_with_another_draft_vocabulary_names_both(self, tmp_path):
        options = {"drafter_training": True, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
        make_trainer(tmp_path, drafter_vocab_size=32, **options).train()
        checkpoint = str(Path(tmp_path) / "run" / "checkpoint-1")
        with pytest.raises(ValueError, match=r"32.*drafter_vocab_size=32"):
            make_trainer(tmp_path, drafter_vocab_size=24, **options).train(resume_from_checkpoint=checkpoint)
