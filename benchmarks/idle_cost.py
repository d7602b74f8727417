"""
What drafter training in the time of waiting adds to a run: whole steps with it on against the same steps with it off.

    make bench-idle

Two processes with a core each, the demo's policy and tasks. No draft token is proposed, so that both runs sample the
same answers from the same weights and step i of one is the work of step i of the other; the program stops when they
are not. The runs take turns (off on, on off, ...); of a step's times the shortest of all rounds counts, since what
else the machine does only ever adds.

On a CPU it needs an allocator that keeps what it has, as `make` sets it. With glibc's defaults every large tensor is
fresh memory, a third of the policy's training is page faults, and what the drafter frees is faulted in again.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from demo_run import make_policy_and_drafter, make_trainer

from grpo_reasoning_gym import DEFAULTS, bind_to_own_cores
from tlt_trl import TLTGRPOConfig


CONFIG = Path(__file__).resolve().parents[1] / "accelerate_configs" / "cpu_2_processes.yaml"
SAME = ("reward", "completions/mean_length", "completions/max_length", "grad_norm", "loss")


def make_config(folder: str, args: argparse.Namespace) -> TLTGRPOConfig:
    changed = {
        "output_dir": folder,
        "seed": args.seed,
        "max_steps": args.steps,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "speculation_selector": "fixed",
        "speculation_activation_threshold": 0,
        "train_drafter": args.variant == "on",
        "disable_tqdm": True,
    }
    return TLTGRPOConfig(**DEFAULTS | changed)


def run_variant(args: argparse.Namespace) -> None:
    """Trains once, in each of the launched processes; the first writes the logs."""
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(folder, args)
        policy, config.drafter_model_name_or_path = make_policy_and_drafter(config)
        bind_to_own_cores()
        trainer = make_trainer(policy, config, [], num_eval_tasks=8)
        trainer.train()
        if trainer.is_world_process_zero():
            usage = resource.getrusage(resource.RUSAGE_SELF)
            figures = {
                "steps": [log for log in trainer.state.log_history if "reward" in log],
                "minor_page_faults": usage.ru_minflt,
                "system_s": usage.ru_stime,
            }
            args.output.write_text(json.dumps(figures))


def launch(variant: str, args: argparse.Namespace) -> dict:
    part = args.output.with_suffix(".part.json")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG), __file__]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([*command, *sys.argv[1:], "--variant", variant, "--output", str(part)], check=True, env=environment)
    figures = json.loads(part.read_text())
    part.unlink()
    return {"variant": variant, **figures}


def check_same_work(runs: list[dict]) -> None:
    first = runs[0]["steps"]
    for run in runs[1:]:
        for log, other in zip(first, run["steps"], strict=True):
            if different := [name for name in SAME if float(log[name]) != float(other[name])]:
                raise RuntimeError(
                    f"Step {log['step']} of a run differs in {different}: its times cannot be compared."
                )


def summarise(runs: list[dict]) -> dict[str, float]:
    """The first step, which has no features to train on, is left out."""

    def shortest(variant: str) -> list[float]:
        times = [[float(log["step_time"]) for log in run["steps"][1:]] for run in runs if run["variant"] == variant]
        return [min(of_step) for of_step in zip(*times, strict=True)]

    def total(name: str) -> float:
        return sum(float(log[name]) for run in on for log in run["steps"][1:])

    def mean(name: str, variant: str) -> float:
        return statistics.mean(run[name] for run in runs if run["variant"] == variant)

    on = [run for run in runs if run["variant"] == "on"]
    off_s, on_s = shortest("off"), shortest("on")
    ratios = [on / off for on, off in zip(on_s, off_s, strict=True)]
    # What two sets of runs without the training differ by, is what this machine cannot resolve.
    off_runs = [sum(float(log["step_time"]) for log in run["steps"][1:]) for run in runs if run["variant"] == "off"]
    used_s = sum(
        float(log.get("tlt/idle_used_fraction", 0.0)) * float(log["tlt/idle_s"])
        for run in on
        for log in run["steps"][1:]
    )
    summary = {
        "added_fraction": sum(on_s) / sum(off_s) - 1,
        "added_fraction_median_step": statistics.median(ratios) - 1,
        "spread_of_off_runs": max(off_runs) / min(off_runs) - 1,
        "accounted_fraction": total("tlt/idle_added_s") / total("step_time"),
        "idle_share": total("tlt/idle_s") / total("step_time"),
        "idle_used_fraction": used_s / total("tlt/idle_s"),
        "drafter_tokens": total("tlt/drafter_tokens") / len(on),
        "minor_page_faults_off": mean("minor_page_faults", "off"),
        "minor_page_faults_on": mean("minor_page_faults", "on"),
        "system_s_off": mean("system_s", "off"),
        "system_s_on": mean("system_s", "on"),
    }
    return {name: round(value, 4) for name, value in summary.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="raw figures (JSON)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=8, help="policy steps of a run, the first left out")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2, help="4 answers a rank each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=["on", "off"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant is not None:
        return run_variant(args)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_policy_and_drafter(make_config(folder, args))  # for the caches, where the launched processes find them
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "variant")}
    runs = []
    for number in range(args.rounds):
        for variant in ("off", "on") if number % 2 == 0 else ("on", "off"):
            runs.append(launch(variant, args))
            args.output.write_text(json.dumps({"settings": settings, "runs": runs}) + "\n")
    check_same_work(runs)
    summary = summarise(runs)
    args.output.write_text(json.dumps({"settings": settings, "summary": summary, "runs": runs}) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
