"""
Does training the drafter keep acceptance up while the policy moves, and bring it back after a jump?

    python benchmarks/adaptive_drafter.py --output benchmarks/results/adaptive_drafter.json

The same GRPO run twice, each in a process of its own: with the drafter trained, and frozen after its warm-up, always
with the same number of draft tokens, so that acceptance lengths can be compared. After `--steps` policy steps the
policy jumps: a supervised training of `--jump_tokens` teaches it another layout of its answers, and `--steps_after`
more steps follow.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def other_layout(solution: str) -> str:
    """`"4 - 9 = -5"` becomes `"4, -9: -5"`: every token of it is in the drafter's reduced vocabulary."""
    return re.sub(r"(-?\d+) ([+-]) (\d+) = ", r"\1, \2\3: ", solution)


def run_variant(args: argparse.Namespace) -> dict[str, list[dict]]:
    """Trains once in this process and returns the logs of steps and evaluations."""
    from demo_run import make_config, make_dataset, make_trainer
    from transformers import TrainerCallback

    from cold_start import ColdStartConfig, train_on_answers

    class Jump(TrainerCallback):
        def on_step_begin(self, callback_args, state, control, model, processing_class, **kwargs):
            if state.global_step != args.steps:
                return
            rows = make_dataset(split="jump", seed=args.seed)
            rows = rows.map(lambda row: {"solution": other_layout(row["solution"])})
            train_on_answers(
                model, processing_class, rows, ColdStartConfig(max_tokens=args.jump_tokens, seed=args.seed)
            )
            # The evaluation of this step has synced the weights before the jump; TRL syncs once for a step.
            self.trainer._last_loaded_step = -1

    class Logs(TrainerCallback):
        """
        Logs of the steps, and of evaluations on the same tasks every time: a step's own acceptance length depends on
        which tasks it drew.
        """

        def __init__(self):
            self.steps, self.evaluations = [], []

        def on_step_end(self, callback_args, state, control, **kwargs):
            control.should_evaluate = state.global_step % 5 == 0 or state.global_step >= args.steps

        def on_log(self, callback_args, state, control, logs, **kwargs):
            row = {"step": state.global_step, **{name: float(value) for name, value in logs.items()}}
            if "eval_reward" in logs:
                self.evaluations.append(row)
            elif "reward" in logs:
                self.steps.append(row)

    with tempfile.TemporaryDirectory() as folder:
        model, config = make_config(
            folder,
            args.seed,
            max_steps=args.steps + args.steps_after,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            learning_rate=args.learning_rate,
            warmup_steps=0,
            lr_scheduler_type="constant",
            speculation_selector="fixed",
            num_draft_tokens=args.num_draft_tokens,
            train_drafter=args.variant == "trained",
            drafter_time_budget=args.drafter_time_budget,
        )
        logs, jump = Logs(), Jump()
        jump.trainer = trainer = make_trainer(model, config, [logs, jump], num_eval_tasks=32)
        trainer.evaluate()
        trainer.train()
    return {"steps": logs.steps, "evaluations": logs.evaluations}


def summarise(logs: dict[str, dict[str, list[dict]]], steps: int) -> dict[str, float]:
    """
    Acceptance lengths of the evaluations before and after the jump.

    The first rollout after the jump is what the drafter has its first features of the new policy from; the evaluation
    right after it shows the fall, the three that follow the recovery.
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
    summary["gain_over_frozen"] = trained[steps] / lengths["frozen"][steps] - 1
    summary["recovered_share"] = max(trained[steps + i] for i in (2, 3, 4)) / trained[steps]
    rows = logs["trained"]["steps"]
    summary["drafter_seconds_share"] = sum(row["tlt/drafter/seconds"] for row in rows) / sum(
        row["step_time"] for row in rows
    )
    return {key: round(value, 4) for key, value in summary.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="raw figures (JSON)")
    parser.add_argument("--steps", type=int, default=20, help="policy steps before the jump")
    parser.add_argument("--steps_after", type=int, default=4, help="steps from the jump on, at least 4")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4, help="4 answers each")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--num_draft_tokens", type=int, default=5)
    parser.add_argument("--jump_tokens", type=int, default=4000, help="tokens of the supervised training")
    parser.add_argument(
        "--drafter_time_budget", type=float, default=0.25, help="share of a step, as waiting would give"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variant", choices=["trained", "frozen"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps_after < 4:
        parser.error("--steps_after must be at least 4: recovery is judged over three steps.")
    if args.variant is not None:
        args.output.write_text(json.dumps(run_variant(args)))
        return
    logs = {}
    for variant in ("frozen", "trained"):
        part = args.output.with_suffix(f".{variant}.json")
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--variant", variant, "--output", str(part)],
            check=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )
        logs[variant] = json.loads(part.read_text())
        part.unlink()
    summary = summarise(logs, args.steps)
    settings = {key: value for key, value in vars(args).items() if key not in ("output", "variant")}
    args.output.write_text(json.dumps({"settings": settings, "summary": summary, "logs": logs}) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
