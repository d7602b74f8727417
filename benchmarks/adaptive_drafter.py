"""
Does training the drafter keep acceptance up while the policy moves, and bring it back after a jump?

    make bench-adaptive

The demo's GRPO at a learning rate that moves the policy visibly, twice: with the drafter trained, and frozen after a
short warm-up. Draft tokens are proposed in evaluations only, always the same number of them: then both runs sample the
same answers and their policies stay the same, bit for bit, so that acceptance lengths can be compared; the program
stops when they do not. On a CPU both run at the same time, a core each. After `--steps` policy steps the policy jumps:
a supervised training as long as its cold start teaches it another layout of its answers, and four more steps follow. A
shorter one leaves a policy that is hard to predict for any drafter: with 4,000 tokens its entropy was four times that
before, and an acceptance length as before is out of reach then.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from demo_run import make_dataset, make_policy_and_drafter, make_trainer
from transformers import TrainerCallback

from cold_start import ColdStartConfig, train_on_answers
from grpo_reasoning_gym import DEFAULTS
from tlt_trl import TLTGRPOConfig, TLTGRPOTrainer
from tlt_trl.generation.standalone import free_port


STEPS_AFTER_JUMP = 4


def other_layout(solution: str) -> str:
    """`"4 - 9 = -5"` becomes `"4, -9: -5"`: of tokens that are in the drafter's reduced vocabulary."""
    return re.sub(r"(-?\d+) ([+-]) (\d+) = ", r"\1, \2\3: ", solution)


def make_config(folder: Path, args: argparse.Namespace, **options) -> TLTGRPOConfig:
    changed = {
        "output_dir": str(folder),
        "seed": args.seed,
        "max_steps": args.steps + STEPS_AFTER_JUMP,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        # What a drafter lacks is text, and answers to one prompt are much the same.
        "num_generations": 4,
        "learning_rate": args.learning_rate,
        "warmup_steps": 0,
        "lr_scheduler_type": "constant",
        "speculation_selector": "fixed",
        "speculation_activation_threshold": 0,
        "speculation_strategies": [f"eagle3 x{args.num_draft_tokens}"],
    }
    if options.get("drafter_training", True):
        changed["drafter_time_budget"] = args.drafter_time_budget
    return TLTGRPOConfig(**DEFAULTS | changed | options)


class Jump(TrainerCallback):
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.trainer = None

    def on_step_begin(self, callback_args, state, control, model, processing_class, **kwargs):
        if state.global_step != self.args.steps:
            return
        rows = make_dataset(split="jump", seed=self.args.seed)
        rows = rows.map(lambda row: {"solution": other_layout(row["solution"])})
        config = ColdStartConfig(max_tokens=self.args.jump_tokens, seed=self.args.seed)
        with self.trainer.online_drafter.evaluating():  # earns the drafter no time either
            train_on_answers(model, processing_class, rows, config)


class Logs(TrainerCallback):
    """
    Logs of the steps, and of evaluations on the same tasks every time: a step's own acceptance length depends on which
    tasks it drew.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.steps, self.evaluations = [], []

    def on_step_end(self, callback_args, state, control, **kwargs):
        control.should_evaluate = state.global_step % 5 == 0 or state.global_step >= self.args.steps

    def on_log(self, callback_args, state, control, logs, **kwargs):
        row = {"step": state.global_step, **{name: float(value) for name, value in logs.items()}}
        if "eval_reward" in logs:
            self.evaluations.append(row)
        elif "reward" in logs:
            self.steps.append(row)


def speculate_in_evaluations(trainer: TLTGRPOTrainer) -> None:
    """Lets evaluations speculate and leaves the random state as it was: what they accept moves it."""
    evaluate, selector = trainer.evaluate, trainer.vllm_generation.rollout_loop.selector

    def evaluate_speculatively(*args, **kwargs):
        selector.activation_threshold = None
        with torch.random.fork_rng():
            metrics = evaluate(*args, **kwargs)
        selector.activation_threshold = 0
        return metrics

    trainer.evaluate = evaluate_speculatively


def run_variant(args: argparse.Namespace) -> None:
    """Trains once in this process and writes the logs of steps and evaluations."""
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            Path(folder),
            args,
            drafter_training=args.variant == "trained",
            drafter_model_name_or_path=args.drafter,
        )
        logs, jump = Logs(args), Jump(args)
        jump.trainer = trainer = make_trainer(args.policy, config, [logs, jump], num_eval_tasks=32)
        speculate_in_evaluations(trainer)
        trainer.evaluate()
        trainer.train()
    args.output.write_text(json.dumps({"steps": logs.steps, "evaluations": logs.evaluations}))


def run_variants(policy: str, drafter: str, args: argparse.Namespace) -> dict[str, dict[str, list[dict]]]:
    cores = sorted(os.sched_getaffinity(0))
    at_once = DEFAULTS["use_cpu"] and len(cores) > 1
    parts = {variant: args.output.with_suffix(f".{variant}.json") for variant in ("frozen", "trained")}
    running = {}
    for (variant, part), core in zip(parts.items(), (cores[0], cores[-1]), strict=True):
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant, "--output", str(part)]
        command += ["--policy", policy, "--drafter", drafter]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "MASTER_PORT": str(free_port())}
        if at_once:
            command += ["--core", str(core)]
            environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core)}
        part.unlink(missing_ok=True)
        if at_once:
            running[variant] = subprocess.Popen(command, env=environment)
        else:
            subprocess.run(command, env=environment, check=True)
    while any(process.poll() is None for process in running.values()):
        time.sleep(1)
        if failed := [variant for variant, process in running.items() if process.poll()]:
            for process in running.values():
                process.terminate()
            raise RuntimeError(f"The {failed[0]} run ended with exit status {running[failed[0]].returncode}.")
    return {variant: json.loads(part.read_text()) for variant, part in parts.items()}


def check_same_policy(logs: dict[str, dict[str, list[dict]]]) -> None:
    for one, other in zip(logs["frozen"]["steps"], logs["trained"]["steps"], strict=True):
        if one["grad_norm"] != other["grad_norm"] or one["reward"] != other["reward"]:
            raise RuntimeError(f"The two policies differ at step {one['step']}: acceptance cannot be compared.")


def summarise(logs: dict[str, dict[str, list[dict]]], steps: int) -> dict[str, float]:
    """
    Acceptance lengths of the evaluations, and entropies of the rollouts, before and after the jump.

    The first rollout after the jump is where the drafter has its first features of the new policy from; the evaluation
    right after it shows the fall, the three that follow the recovery; `recovered_share` is the best of these three.
    """
    lengths = {
        name: {row["step"]: row["eval_tlt/acceptance_length"] for row in log["evaluations"]}
        for name, log in logs.items()
    }
    summary = {"first": lengths["trained"][0]}
    for name, length in lengths.items():
        summary[f"{name}_before_jump"] = length[steps]
        summary[f"{name}_at_jump"] = length[steps + 1]
        summary[f"{name}_three_steps_later"] = length[steps + 4]
    trained = lengths["trained"]
    rewards = {row["step"]: row["eval_reward"] for row in logs["trained"]["evaluations"]}
    summary |= {"reward_first": rewards[0], "reward_before_jump": rewards[steps]}
    summary["gain_over_frozen"] = trained[steps] / lengths["frozen"][steps] - 1
    summary["recovered_share"] = max(trained[steps + i] for i in (2, 3, 4)) / trained[steps]
    rows = logs["trained"]["steps"]
    for name, those in (("before", rows[steps - 4 : steps]), ("after", rows[steps:])):
        summary[f"entropy_{name}_jump"] = sum(row["entropy"] for row in those) / len(those)
    summary["drafter_time_share"] = sum(row["tlt/drafter/time_s"] for row in rows) / sum(
        row["step_time"] for row in rows
    )
    return {key: round(value, 4) for key, value in summary.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="raw figures (JSON)")
    parser.add_argument("--steps", type=int, default=20, help="policy steps before the jump, a multiple of 5")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=12, help="4 answers to one prompt each")
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--num_draft_tokens", type=int, default=5)
    parser.add_argument("--warmup_tokens", type=int, default=8000, help="of answers to warm the drafter up with")
    parser.add_argument("--jump_tokens", type=int, default=ColdStartConfig.max_tokens, help="tokens of the jump")
    parser.add_argument("--drafter_time_budget", type=float, default=0.25, help="share of a step")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("--variant", "--policy", "--drafter"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant is not None:
        return run_variant(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        policy, drafter = make_policy_and_drafter(make_config(Path(folder), args), args.warmup_tokens)
        logs = run_variants(policy, drafter, args)
    settings = {name: getattr(args, name) for name in (
        "steps", "gradient_accumulation_steps", "learning_rate", "num_draft_tokens", "warmup_tokens",
        "jump_tokens", "drafter_time_budget", "seed",
    )}  # fmt: skip
    args.output.write_text(json.dumps({"settings": settings, "logs": logs}) + "\n")
    check_same_policy(logs)
    summary = summarise(logs, args.steps)
    args.output.write_text(json.dumps({"settings": settings, "summary": summary, "logs": logs}) + "\n")
    for variant in logs:
        args.output.with_suffix(f".{variant}.json").unlink()
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
