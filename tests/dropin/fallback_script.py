"""One training run that cannot speculate, in a process of its own; prints what came of it as JSON."""

import json
import logging
import sys

import torch
from tests.conftest import save_tiny_policy
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward

from tlt_trl import TLTGRPOTrainer
from tlt_trl.generation import speculative_generation
from tlt_trl.generation.canary import CanaryResult


class Listening(logging.Handler):
    """Keeps warnings of this package."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def train(folder, model_type="llama", canary_fails=False, **kwargs):
    """Trains for three steps, and compares the engine's log-probs with the policy's own."""
    if canary_fails:
        failed = [CanaryResult("sampled distribution", False, "the temperature is wrong")]
        speculative_generation.run_canary = lambda engine, has_weights: failed
    listening = Listening()
    logging.getLogger("tlt_trl").addHandler(listening)
    policy = save_tiny_policy(f"{folder}/policy", num_layers=2, model_type=model_type)
    args = colocated_arguments(f"{folder}/run", save_strategy="steps", save_steps=3, **kwargs)
    trainer = TLTGRPOTrainer(policy, text_reward, args, prompts(), eval_dataset=prompts(4))
    trainer.train()
    trainer.evaluate()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "speculative": trainer.speculative,
        "has_drafter": trainer.drafter is not None,
        "generation": type(trainer.vllm_generation).__name__,
        "speculates": trainer.vllm_generation.llm.llm_engine.vllm_config.speculative_config is not None,
        "hooks": sum(len(module._forward_pre_hooks) for module in trainer.model.modules()),
        "names": sorted(set().union(*logs)),
        "logp_difference": max(log["sampling/sampling_logp_difference/max"] for log in logs),
        "moved": any(log["grad_norm"] for log in logs),
        "warnings": listening.messages,
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    print("RESULT", json.dumps(train(sys.argv[1], **json.loads(sys.argv[2]))))
