"""
Does training the drafter keep acceptance up while the policy moves, and bring it back after a jump?

    python benchmarks/adaptive_drafter.py --output benchmarks/results/adaptive_drafter.json

The same GRPO run twice, each in a process of its own: with the drafter trained, and frozen after its warm-up. Three
draft tokens always, so that acceptance lengths can be compared. After `--steps` policy steps, noise is added to every
weight matrix of the policy (`--jump`, relative to its standard deviation), and `--steps_after` more follow.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))


def run_variant(args: argparse.Namespace) -> list[dict]:
    """Trains once in this process and returns the logs."""
    import torch
    from transformers import AutoTokenizer, TrainerCallback

    from cold_start import cold_started_policy
    from grpo_reasoning_gym import DEFAULTS, DemoArguments, MetricsFile, warmed_up_drafter, write_prompts
    from reasoning_tasks import make_dataset, step_reward
    from tlt_trl import TLTGRPOConfig, TLTGRPOTrainer

    class Jump(TrainerCallback):
        def on_step_end(self, callback_args, state, control, model, **kwargs):
            if state.global_step != args.steps:
                return
            generator = torch.Generator().manual_seed(args.seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                        parameter += args.jump * parameter.std() * noise

    with tempfile.TemporaryDirectory() as folder:
        config = TLTGRPOConfig(
            **DEFAULTS
            | {
                "output_dir": folder,
                "max_steps": args.steps + args.steps_after,
                "gradient_accumulation_steps": args.gradient_accumulation_steps,
                "learning_rate": args.learning_rate,
                "warmup_steps": 0,
                "lr_scheduler_type": "constant",
                "speculation_selector": "fixed",
                "num_draft_tokens": 3,
                "train_drafter": args.variant == "trained",
                "drafter_time_budget": args.drafter_time_budget,
                "seed": args.seed,
            }
        )
        dataset = make_dataset(split="train", seed=args.seed)
        model = str(cold_started_policy())
        prompts = write_prompts(dataset, Path(folder) / "prompts.jsonl", 512)
        config.drafter_model_name_or_path = warmed_up_drafter(model, prompts, DemoArguments(), config)
        metrics = MetricsFile(Path(folder) / "metrics.jsonl")
        tokenizer = AutoTokenizer.from_pretrained(model)
        callbacks = [metrics, Jump()]
        trainer = TLTGRPOTrainer(model, step_reward, config, dataset, processing_class=tokenizer, callbacks=callbacks)
        trainer.train()
        return metrics.rows


def summarise(rows: dict[str, list[dict]], steps: int) -> dict[str, float]:
    """Acceptance lengths before and after the jump. Row i is a rollout after i policy steps."""
    lengths = {name: [row["tlt/acceptance_length"] for row in logs] for name, logs in rows.items()}
    last = {name: statistics.mean(values[steps - 3 : steps]) for name, values in lengths.items()}
    summary = {"first": lengths["trained"][0], "gain_over_frozen": last["trained"] / last["frozen"] - 1}
    for name, values in lengths.items():
        summary[f"{name}_before_jump"] = last[name]
        summary[f"{name}_at_jump"] = values[steps]
        summary[f"{name}_three_steps_later"] = values[steps + 3]
    summary["recovered_within_3_steps"] = max(lengths["trained"][steps + 1 : steps + 4]) >= 0.95 * last["trained"]
    trained = rows["trained"]
    summary["drafter_seconds_share"] = sum(row["tlt/drafter/seconds"] for row in trained) / sum(
        row["step_time"] for row in trained
    )
    return {key: round(value, 4) for key, value in summary.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="raw figures (JSON)")
    parser.add_argument("--steps", type=int, default=20, help="policy steps before the jump")
    parser.add_argument("--steps_after", type=int, default=4, help="rollouts from the jump on, at least 4")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4, help="4 answers each")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--jump", type=float, default=0.05, help="noise added, in standard deviations of each matrix")
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
    rows = {}
    for variant in ("frozen", "trained"):
        part = args.output.with_suffix(f".{variant}.json")
        subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--variant", variant, "--output", str(part)],
            check=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        )
        rows[variant] = json.loads(part.read_text())
        part.unlink()
    summary = summarise(rows, args.steps)
    settings = {key: value for key, value in vars(args).items() if key not in ("output", "variant")}
    args.output.write_text(json.dumps({"settings": settings, "summary": summary, "rows": rows}) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
