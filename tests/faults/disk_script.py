"""
Run by `test_disk.py` in a process of its own: a LoRA run whose disk has room for the adapter, not for the drafter.

Usage: disk_script.py POLICY_DIR OUTPUT_DIR. Prints one line of JSON.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path

from peft import LoraConfig
from tests.faults.test_disk import room_for
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward
from transformers import TrainerCallback

from tlt_trl import TLTGRPOTrainer
from tlt_trl.drafter.training_state import newest_whole_checkpoint, newest_whole_drafter


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def count(self, words):
        return sum(words in text for text in self.texts)


class Terminated(TrainerCallback):
    """Is sent SIGTERM after a step, and again while the disk, which is slow, writes the checkpoint for it."""

    def __init__(self):
        self.sent = 0

    def on_step_end(self, args, state, control, **kwargs):
        if not self.sent:
            self.sent = 1
            fsync = os.fsync

            def slow(descriptor):
                if self.sent == 1:
                    self.sent = 2
                    os.kill(os.getpid(), signal.SIGTERM)
                fsync(descriptor)

            os.fsync = slow
            os.kill(os.getpid(), signal.SIGTERM)


def main(policy_dir: str, output_dir: str) -> None:
    messages = Messages()
    logging.getLogger("tlt_trl").addHandler(messages)
    args = colocated_arguments(
        output_dir,
        gradient_accumulation_steps=2,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        drafter_time_budget=0.0,
        enable_jit_checkpoint=True,
    )
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    trainer = TLTGRPOTrainer(policy_dir, text_reward, args, prompts(), peft_config=lora)
    result = {}
    with room_for(80_000):
        trainer.train()
    result["full"] = {
        "steps": trainer.state.global_step,
        "alarms": messages.count("ALARM drafter_not_saved"),
        "metric": [log["tlt/alarm/drafter_not_saved"] for log in trainer.state.log_history if "loss" in log],
        "checkpoint": newest_whole_checkpoint(output_dir),
        "drafter": newest_whole_drafter(Path(output_dir) / "checkpoint-4"),
        "left": os.listdir(Path(output_dir) / "drafter"),
    }
    args.max_steps = 6
    trainer.train(resume_from_checkpoint=True)
    result["resumed"] = {
        "first_step": next(log["step"] for log in trainer.state.log_history[::-1] if "loss" in log),
        "without_drafter": messages.count("Going on with the drafter that this run began with"),
        "drafter": newest_whole_drafter(Path(output_dir) / "checkpoint-6"),
        "left": sorted(os.listdir(Path(output_dir) / "drafter")),
    }
    terminated = Terminated()
    trainer.add_callback(terminated)
    args.max_steps, args.save_steps = 1000, 1000
    # transformers gives the signal back at the end of a run, so the handler of this process is set anew.
    jit = next(
        callback for callback in trainer.callback_handler.callbacks if type(callback).__name__.startswith("JIT")
    )
    jit.set_trainer(trainer)
    trainer.train()
    newest = newest_whole_checkpoint(output_dir)
    result["terminated"] = {
        "signals": terminated.sent,
        "step": trainer.state.global_step,
        "checkpoint": newest,
        "drafter": newest_whole_drafter(newest),
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
