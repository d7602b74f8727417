"""
Run by `test_resume.py` in processes of their own: trains on the tiny policy, writes down what a resume must restore.

Usage: resume_run.py POLICY_DIR OUTPUT_DIR JSON_FILE KWARGS_AS_JSON; with several processes each writes JSON_FILE.RANK.

Times steer how long the drafter is trained and what the selector learns, so here a clock is injected that only work
moves on: 0.1 ms per optimiser step of the drafter, 5 ms per engine step. Everything else is the real thing.
"""

# ruff: noqa: E402

import hashlib
import json
import sys
import time


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def advance_after(self, function, seconds):
        def advancing(*args, **kwargs):
            result = function(*args, **kwargs)
            self.now_s += seconds
            return result

        return advancing


# Before anything takes the real one.
clock = Clock()
time.perf_counter = lambda: clock.now_s

import torch

from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward
from tlt_trl import TLTGRPOTrainer, online_drafter
from tlt_trl.drafter import DrafterTrainer
from tlt_trl.idle import spot_training


def fixed_idle_time(num_steps: int) -> None:
    """Each rank finds time for so many optimiser steps, then waits for the others as usual."""
    train = spot_training.train_until_all_finished

    def train_for_fixed_steps(trainer, wait, *args, **kwargs):
        train_for, last_step = trainer.train_for, trainer.steps + num_steps
        trainer.train_for = lambda *_, **__: train_for(float("inf"), stop=lambda: trainer.steps >= last_step)
        wait.all_finished = lambda: False
        try:
            return train(trainer, wait, *args, **kwargs)
        finally:
            del trainer.train_for, wait.all_finished

    online_drafter.train_until_all_finished = train_for_fixed_steps


def digest(tensors) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def main(policy_dir: str, output_dir: str, json_file: str, kwargs: str) -> None:
    kwargs = json.loads(kwargs)
    resume = kwargs.pop("resume", None)
    DrafterTrainer.step = clock.advance_after(DrafterTrainer.step, 0.0001)
    args = colocated_arguments(
        output_dir,
        **{
            "gradient_accumulation_steps": 2,
            "drafter_time_budget": 0.5,
            # No lookups: what a lookup has seen is not in the checkpoint.
            "speculation_strategies": ["eagle3 x1", "eagle3 x2", "eagle3 x3", "eagle3 x5"],
            "max_steps": 6,
            "save_strategy": "steps",
            "save_steps": 3,
        }
        | kwargs,
    )
    trainer = TLTGRPOTrainer(policy_dir, text_reward, args, prompts())
    llm_engine = trainer.vllm_generation.llm.llm_engine
    llm_engine.step = clock.advance_after(llm_engine.step, 0.005)
    rank, ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
    if ranks > 1:
        fixed_idle_time(num_steps=2 + rank)
    trainer.train(resume_from_checkpoint=resume)
    online = trainer.online_drafter
    state = online.trainer.optimizer.state_dict()["state"]
    result = {
        "logs": [log for log in trainer.state.log_history if "loss" in log],
        "policy": digest(trainer.model.parameters()),
        "drafter": digest(trainer.drafter.parameters()),
        "optimizer": digest(state[i][name] for i in sorted(state) for name in sorted(state[i])),
        "generator": online.trainer.generator.get_state().tolist(),
        "drafter_steps": online.steps,
        "drafter_tokens": online.tokens_trained,
        "buffer": digest(sample.aux_hidden_states for sample in online.buffer.samples),
        "payback": online.payback.state_dict(),
        "selector": trainer.vllm_generation.rollout_loop.selector.state_dict(),
    }
    with open(json_file if ranks == 1 else f"{json_file}.{rank}", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
