"""
What drafter training in the time of waiting adds to a run: every step with it, and the same step without.

    make bench-idle

Two processes with a core each, the demo's policy and tasks. Every step is done twice, one right after the other, with
the drafter trained in one of the two; which comes first changes from pair to pair. The learning rate is zero, no draft
token is proposed and both steps of a pair get the same prompts and seed, so that they are the same work, bit for bit;
the program ends with an error when they were not. What other programs on the machine do then hits both much alike.

On a CPU it needs an allocator that keeps what it has, as `make` sets it. With glibc's defaults every large tensor is
fresh memory, a third of the policy's training is system time, and what the drafter frees is faulted in again.

The time of a step is TRL's `step_time`: rollout, scoring and all passes of the policy, without the optimiser's step.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from demo_run import make_dataset, make_policy_and_drafter, make_trainer
from transformers import TrainerCallback

from grpo_reasoning_gym import DEFAULTS, bind_to_own_cores
from tlt_trl import TLTGRPOConfig, TLTGRPOTrainer


CONFIG = Path(__file__).resolve().parents[1] / "accelerate_configs" / "cpu_2_processes.yaml"
SAME = ("reward", "completions/mean_length", "completions/max_length", "grad_norm", "loss")
# In the first steps there are no features to train on, and a longer answer than any before makes the process grow,
# which falls on the first step of a pair.
PAIRS_LEFT_OUT = 5


def make_config(folder: str, args: argparse.Namespace) -> TLTGRPOConfig:
    changed = {
        "output_dir": folder,
        "seed": args.seed,
        "max_steps": 2 * args.pairs,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "learning_rate": 0.0,
        "shuffle_dataset": False,
        "speculation_selector": "fixed",
        "speculation_activation_threshold": 0,
        "disable_tqdm": True,
    }
    return TLTGRPOConfig(**DEFAULTS | changed)


def tasks_twice(config: TLTGRPOConfig, num_processes: int) -> Dataset:
    """The demo's tasks in their order, those of a step two times."""
    answers = config.per_device_train_batch_size * config.gradient_accumulation_steps * num_processes
    per_step = answers // config.num_generations
    starts = range(0, config.max_steps // 2 * per_step, per_step)
    tasks = make_dataset(split="train", num_examples=len(starts) * per_step, seed=config.seed)
    return tasks.select([row for start in starts for row in 2 * [*range(start, start + per_step)]])


def is_with_training(step: int) -> bool:
    """Of the steps from 1: without, with, with, without, and so on."""
    return step % 4 in (2, 3)


class Steps(TrainerCallback):
    """Seeds both steps of a pair alike; logs of the steps, with what each took of the system."""

    def __init__(self, seed: int):
        self.seed = seed
        self.rows = []

    def on_step_begin(self, args, state, control, **kwargs):
        torch.manual_seed((self.seed << 32) + (state.global_step // 2 << 8) + args.process_index)
        self.began = resource.getrusage(resource.RUSAGE_SELF)

    def on_step_end(self, args, state, control, **kwargs):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.usage = {
            "minor_page_faults": usage.ru_minflt - self.began.ru_minflt,
            "system_s": usage.ru_stime - self.began.ru_stime,
        }

    def on_log(self, args, state, control, logs, **kwargs):
        if "reward" in logs:
            row = {"step": state.global_step, "with_training": is_with_training(state.global_step)}
            self.rows.append(row | {name: float(value) for name, value in logs.items()} | self.usage)


def train_in_some_steps(trainer: TLTGRPOTrainer) -> None:
    """In the other steps ranks wait for each other as TRL's do; everything else is the same."""
    online_drafter = trainer.online_drafter
    train_after_rollout = online_drafter.train_after_rollout

    def train_or_not() -> None:
        if is_with_training(trainer.state.global_step + 1):
            train_after_rollout()

    online_drafter.train_after_rollout = train_or_not


def run_rank(args: argparse.Namespace) -> None:
    """One of the launched processes; the first writes the logs."""
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(folder, args)
        policy, config.drafter_model_name_or_path = make_policy_and_drafter(config)
        bind_to_own_cores()
        steps = Steps(args.seed)
        tasks = tasks_twice(config, int(os.environ["WORLD_SIZE"]))
        trainer = make_trainer(policy, config, [steps], num_eval_tasks=8, tasks=tasks)
        train_in_some_steps(trainer)
        trainer.train()
        if trainer.is_world_process_zero():
            args.output.write_text(json.dumps(steps.rows))


def pairs_of(rows: list[dict]) -> list[tuple[dict, dict]]:
    """The pairs that count, the step with drafter training first in each."""
    pairs = []
    for pair in zip(rows[::2], rows[1::2], strict=True):
        without, with_training = sorted(pair, key=lambda row: row["with_training"])
        if different := [name for name in SAME if without[name] != with_training[name]]:
            raise RuntimeError(f"Steps {[row['step'] for row in pair]} differ in {different}: not the same work.")
        pairs.append((with_training, without))
    return pairs[PAIRS_LEFT_OUT:]


def added_fraction(pairs: list[tuple[dict, dict]]) -> tuple[float, float]:
    """
    Returns:
        `tuple[float, float]`: What drafter training adds to the time of a step, as the mean over pairs of the ratio
        (geometric), and the standard error of that.
    """
    logs = [math.log(one["step_time"] / other["step_time"]) for one, other in pairs]
    # Pairs whose second step is the one with training, and those whose first is, weigh the same.
    halves = logs[::2], logs[1::2]
    mean = statistics.mean(statistics.mean(half) for half in halves)
    variance = sum(statistics.variance(half) / len(half) for half in halves) / 4
    return math.expm1(mean), math.sqrt(variance)


def summarise(pairs: list[tuple[dict, dict]]) -> dict[str, float]:
    def total(name: str, with_training: bool = True) -> float:
        return sum(pair[0 if with_training else 1][name] for pair in pairs)

    added, error = added_fraction(pairs)
    used_s = sum(row.get("tlt/idle_used_fraction", 0.0) * row["tlt/idle_s"] for row, _ in pairs)
    summary = {
        "added_fraction": added,
        "added_fraction_standard_error": error,
        "accounted_fraction": total("tlt/idle_added_s") / total("step_time"),
        "idle_share": total("tlt/idle_s") / total("step_time"),
        "idle_used_fraction": used_s / total("tlt/idle_s"),
        "stop_latency_s": total("tlt/stop_latency_s") / len(pairs),
        "drafter_tokens_per_step": total("tlt/drafter_tokens") / len(pairs),
    }
    for name in ("step_time", "tlt/rollout/time_s", "system_s", "minor_page_faults"):
        summary[f"{name.removeprefix('tlt/')}_with"] = total(name) / len(pairs)
        summary[f"{name.removeprefix('tlt/')}_without"] = total(name, with_training=False) / len(pairs)
    return {name: round(value, 4) for name, value in summary.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="raw figures (JSON)")
    parser.add_argument("--pairs", type=int, default=80, help=f"steps with and without; {PAIRS_LEFT_OUT} are left out")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2, help="4 answers a rank each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--is_rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pairs < PAIRS_LEFT_OUT + 4:
        parser.error(f"--pairs must be at least {PAIRS_LEFT_OUT + 4}, for a standard error of either order.")
    if args.is_rank:
        return run_rank(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_policy_and_drafter(make_config(folder, args))  # for the caches, where the launched processes find them
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG), __file__]
    command += [*sys.argv[1:], "--is_rank"]
    subprocess.run(command, check=True, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"})
    rows = json.loads(args.output.read_text())
    summary = summarise(pairs_of(rows))
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "is_rank")}
    args.output.write_text(json.dumps({"settings": settings, "summary": summary, "steps": rows}) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
