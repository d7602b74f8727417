"""
What drafter training in the time of waiting adds to a run: every step with it against the same step without.

    make bench-idle

Two processes with a core each, the demo's policy and tasks. No draft token is proposed, so that all runs sample the
same answers from the same weights and step i of one is the work of step i of the other; the program stops when they
are not. One run trains its drafter in the even steps and the other in the odd ones: each step is there with and
without, each run has as many of both, and what one run is slower than the other as a whole cancels.

On a CPU it needs an allocator that keeps what it has, as `make` sets it. With glibc's defaults every large tensor is
fresh memory, 18 to 35 % of the policy's training are page faults, and what the drafter frees is faulted in again.

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

from demo_run import make_policy_and_drafter, make_trainer
from transformers import TrainerCallback

from grpo_reasoning_gym import DEFAULTS, bind_to_own_cores
from tlt_trl import TLTGRPOConfig, TLTGRPOTrainer


CONFIG = Path(__file__).resolve().parents[1] / "accelerate_configs" / "cpu_2_processes.yaml"
SAME = ("reward", "completions/mean_length", "completions/max_length", "grad_norm", "loss")
# The first step has no features to train on.
FIRST_STEP = 2


def make_config(folder: str, args: argparse.Namespace) -> TLTGRPOConfig:
    changed = {
        "output_dir": folder,
        "seed": args.seed,
        "max_steps": args.steps,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "speculation_selector": "fixed",
        "speculation_activation_threshold": 0,
        "disable_tqdm": True,
    }
    return TLTGRPOConfig(**DEFAULTS | changed)


class Steps(TrainerCallback):
    """Logs of the steps, with what each took of the system."""

    def __init__(self):
        self.rows = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = resource.getrusage(resource.RUSAGE_SELF)

    def on_step_end(self, args, state, control, **kwargs):
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.usage = {
            "minor_page_faults": usage.ru_minflt - self.began.ru_minflt,
            "system_s": usage.ru_stime - self.began.ru_stime,
        }

    def on_log(self, args, state, control, logs, **kwargs):
        if "reward" in logs:
            values = {name: float(value) for name, value in logs.items()}
            self.rows.append({"step": state.global_step, **values, **self.usage})


def train_in_some_steps(trainer: TLTGRPOTrainer, remainder: int) -> None:
    """In the other steps ranks wait for each other as TRL's do; everything else is the same."""
    train_drafter = trainer._train_drafter

    def train_or_not(rollout_started_s: float) -> None:
        if (trainer.state.global_step + 1) % 2 == remainder:
            train_drafter(rollout_started_s)

    trainer._train_drafter = train_or_not


def run_once(args: argparse.Namespace) -> None:
    """Trains once, in each of the launched processes; the first writes the logs."""
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(folder, args)
        policy, config.drafter_model_name_or_path = make_policy_and_drafter(config)
        bind_to_own_cores()
        steps = Steps()
        trainer = make_trainer(policy, config, [steps], num_eval_tasks=8)
        train_in_some_steps(trainer, args.remainder)
        trainer.train()
        if trainer.is_world_process_zero():
            args.output.write_text(json.dumps(steps.rows))


def launch(remainder: int, args: argparse.Namespace) -> list[dict]:
    """Logs of the steps of a run that trains its drafter in the steps with that remainder by two."""
    part = args.output.with_suffix(".part.json")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG), __file__]
    command += [*sys.argv[1:], "--remainder", str(remainder), "--output", str(part)]
    subprocess.run(command, check=True, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"})
    rows = json.loads(part.read_text())
    part.unlink()
    return [row | {"with_training": row["step"] % 2 == remainder} for row in rows]


def check_same_work(runs: list[list[dict]]) -> None:
    for run in runs[1:]:
        for row, other in zip(runs[0], run, strict=True):
            if different := [name for name in SAME if row[name] != other[name]]:
                raise RuntimeError(
                    f"Step {row['step']} of a run differs in {different}: its times cannot be compared."
                )


def added_fraction(runs: list[list[dict]]) -> tuple[float, float]:
    """
    Returns:
        `tuple[float, float]`: What drafter training adds to the time of the steps, as a share of it, and the standard
        error of that: as much as the ratios of single steps scatter.
    """
    log_ratios, ratios = ([], []), []
    for remainder in (0, 1):
        sums = {True: 0.0, False: 0.0}
        for rows in zip(*runs, strict=True):
            if rows[0]["step"] < FIRST_STEP or rows[0]["step"] % 2 != remainder:
                continue
            with_s, without_s = (
                statistics.mean(row["step_time"] for row in rows if row["with_training"] == kind)
                for kind in (True, False)
            )
            sums[True] += with_s
            sums[False] += without_s
            log_ratios[remainder].append(math.log(with_s / without_s))
        ratios.append(sums[True] / sums[False])
    # A run that is slower as a whole makes one of the two ratios larger by what it makes the other smaller.
    variance = sum(statistics.variance(logs) / len(logs) for logs in log_ratios) / 4
    return math.sqrt(ratios[0] * ratios[1]) - 1, math.sqrt(variance)


def summarise(runs: list[list[dict]]) -> dict[str, float]:
    rows = [row for run in runs for row in run if row["step"] >= FIRST_STEP]
    kinds = {kind: [row for row in rows if row["with_training"] == kind] for kind in (True, False)}

    def total(name: str, kind: bool = True) -> float:
        return sum(row[name] for row in kinds[kind])

    added, error = added_fraction(runs)
    used_s = sum(row.get("tlt/idle_used_fraction", 0.0) * row["tlt/idle_s"] for row in kinds[True])
    summary = {
        "added_fraction": added,
        "added_fraction_standard_error": error,
        "accounted_fraction": total("tlt/idle_added_s") / total("step_time"),
        "idle_share": total("tlt/idle_s") / total("step_time"),
        "idle_used_fraction": used_s / total("tlt/idle_s"),
        "drafter_tokens_per_step": total("tlt/drafter_tokens") / len(kinds[True]),
        "system_s_per_step_with": total("system_s") / len(kinds[True]),
        "system_s_per_step_without": total("system_s", False) / len(kinds[False]),
        "page_faults_per_step_with": total("minor_page_faults") / len(kinds[True]),
        "page_faults_per_step_without": total("minor_page_faults", False) / len(kinds[False]),
    }
    return {name: round(value, 4) for name, value in summary.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="raw figures (JSON)")
    parser.add_argument("--rounds", type=int, default=1, help="two runs each")
    parser.add_argument("--steps", type=int, default=33, help="policy steps of a run, the first left out")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2, help="4 answers a rank each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--remainder", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 5:
        parser.error("--steps must be at least 5: two steps with and two without after the first.")
    if args.remainder is not None:
        return run_once(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_policy_and_drafter(make_config(folder, args))  # for the caches, where the launched processes find them
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "remainder")}
    runs = []
    for number in range(args.rounds):
        for remainder in (0, 1) if number % 2 == 0 else (1, 0):
            runs.append(launch(remainder, args))
            args.output.write_text(json.dumps({"settings": settings, "runs": runs}) + "\n")
    check_same_work(runs)
    summary = summarise(runs)
    args.output.write_text(json.dumps({"settings": settings, "summary": summary, "runs": runs}) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
