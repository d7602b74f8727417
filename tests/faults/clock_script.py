"""
Run by `test_clocks.py` in a process of its own: a trainer, trained three times, with a clock that only work moves on.

Usage: clock_script.py POLICY_DIR OUTPUT_DIR. Prints one line of JSON.

Of the run's own time is 1 s a reward of a training batch. Not of it are 4 s a reward of an evaluation or prediction,
20 s a save, and 30 s before each run. Engine steps take 5 ms and optimiser steps of the drafter 10 ms.
"""

import json
import sys

from tests.resume_run import clock  # replaces the real one, so it comes before what takes that
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward
from transformers import TrainerCallback

from tlt_trl import TLTGRPOTrainer
from tlt_trl.drafter import DrafterTrainer


class Observer(TrainerCallback):
    """Ages of what is in the buffer after each step; lets the policy predict after the second."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.ages = []

    def on_step_end(self, args, state, control, **kwargs):
        buffer = self.trainer.online_drafter.buffer
        self.ages.append([buffer.current_step - sample.step for sample in buffer.samples])
        if state.global_step == 2:
            self.trainer.predict(prompts(4))


def main(policy_dir: str, output_dir: str) -> None:
    DrafterTrainer.step = clock.advance_after(DrafterTrainer.step, 0.01)

    def reward(completions, **kwargs):
        clock.now_s += 1.0 if trainer.model.training else 4.0
        return text_reward(completions)

    args = colocated_arguments(
        output_dir,
        gradient_accumulation_steps=2,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=3,
        # A fixed strategy has no prices, so that all of the budget is trained for.
        speculation_selector="fixed",
        drafter_time_budget=0.2,
        # Five steps' worth, so that another run's features would be in the way.
        feature_buffer_tokens=440,
    )
    eval_sets = {"first": prompts(4), "second": prompts(4)}
    trainer = TLTGRPOTrainer(policy_dir, reward, args, prompts(), eval_dataset=eval_sets)
    observer = Observer(trainer)
    trainer.add_callback(observer)
    llm_engine = trainer.vllm_generation.llm.llm_engine
    llm_engine.step = clock.advance_after(llm_engine.step, 0.005)
    trainer.save_model = clock.advance_after(trainer.save_model, 20.0)
    runs = []
    for resume in (None, None, f"{output_dir}/checkpoint-3"):
        clock.now_s += 30.0
        observer.ages = []
        trainer.train(resume_from_checkpoint=resume)
        # A resumed run begins with the logs of the one that it goes on with.
        logs = [log for log in trainer.state.log_history if "tlt/payback/step_s" in log][-len(observer.ages) :]
        counted_s, steps = ([log[name] for log in logs] for name in ("tlt/payback/step_s", "tlt/drafter/steps"))
        runs.append({"counted_s": counted_s, "ages": observer.ages, "drafter_steps": sum(steps)})
    print("RESULT", json.dumps(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
