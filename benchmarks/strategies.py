"""
Prepares the standard cases of `tlt-trl bench strategies`.

    python benchmarks/strategies.py --output runs/bench_strategies
    tlt-trl bench strategies --json

Two policies on the same eight prompts, whose answers take from two lines to twenty-one, so that a rollout shrinks from
eight requests to one: the cold-started SmolLM2 of the demo with a drafter warmed up on its answers, and the untuned
SmolLM2, whose answers at temperature 1 can hardly be drafted.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from cold_start import cold_started_policy, find_base_model, load_base_model  # noqa: E402
from reasoning_tasks import TaskConfig, make_dataset  # noqa: E402


NUM_TERMS = (2, 3, 3, 4, 5, 7, 11, 22)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench_strategies"))
    parser.add_argument("--warmup_tokens", type=int, default=24_000)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)

    tuned = cold_started_policy()
    untuned = args.output / "untuned"
    if not untuned.exists():
        for part in load_base_model(find_base_model()):
            part.save_pretrained(untuned)

    prompts = args.output / "prompts.jsonl"
    write(
        prompts, [row for terms in NUM_TERMS for row in make_dataset("bench", 1, terms, TaskConfig(1, terms, terms))]
    )
    drafter = args.output / "drafter"
    if not drafter.exists():
        warmup_prompts = args.output / "warmup_prompts.jsonl"
        write(warmup_prompts, make_dataset("train", 512))
        subprocess.run(
            [
                sys.executable, "-m", "tlt_trl.tools.cli", "warmup", "--model", str(tuned),
                "--prompts", str(warmup_prompts),
                "--output", str(drafter), "--tokens", str(args.warmup_tokens), "--epochs", "3",
                "--draft_vocab_size", "2048",
            ],
            check=True,
        )  # fmt: skip
    shared = {"drafter": str(drafter), "prompts": str(prompts)}
    cases = [
        {"name": "cold-started SmolLM2", "model": str(tuned), "max_completion_length": 256, **shared},
        {"name": "untuned SmolLM2", "model": str(untuned), "max_completion_length": 96, **shared},
    ]
    (args.output / "cases.json").write_text(json.dumps(cases, indent=2) + "\n")


def write(path: Path, rows) -> None:
    path.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
