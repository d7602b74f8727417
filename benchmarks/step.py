"""
Prepares the standard workloads of `tlt-trl bench step`.

    python benchmarks/step.py --workloads demo hard
    tlt-trl bench step --workloads demo hard --json

* `demo`: policy, tasks and warmed-up drafter of the demo.
* `hard`: the untuned SmolLM2 at temperature 1, which nothing can draft, and no drafter to start from.
* `swap`: the demo's policy after nothing but two names were swapped: no drafter to start from, forty steps.
* `long-tail`: LoRA and one long answer among short ones, so that the rollout is most of the step. Its policy is
  cold-started on chains of up to 110 terms.

Both trainers get TRL's own number of requests at once and the same KV cache.
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from demo_run import ROOT, DemoArguments, TLTGRPOConfig, make_policy_and_drafter, warmed_up_drafter, write_prompts

from cold_start import ColdStartConfig, cold_started_policy, find_base_model, load_base_model
from grpo_reasoning_gym import DEFAULTS
from reasoning_tasks import TaskConfig, make_dataset
from tlt_trl.tools.step_summary import Workload


# What `tlt-trl bench step` sets itself, and what belongs to the engine.
SET_BY_BENCH = (
    "output_dir", "use_vllm", "vllm_mode", "vllm_engine_kwargs", "max_steps", "logging_steps", "save_strategy",
    "report_to", "seed",
)  # fmt: skip
CONFIG = {name: value for name, value in DEFAULTS.items() if name not in SET_BY_BENCH}
ENGINE = {"kv_cache_memory_bytes": 2**28}
REWARD = f"{ROOT / 'examples' / 'reasoning_tasks.py'}:step_reward"

SHORT_TASKS, LONG_TASKS = TaskConfig(1, 2, 4), TaskConfig(1, 100, 110)
LONG_ANSWER_TOKENS = 1536
# Two short prompts for each long one, two answers to each; the last layers only, and no pass that scores the answers
# again: what a policy of 135M spends on training is otherwise more than its rollout takes.
LONG_TAIL_CONFIG = CONFIG | {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "num_generations": 2,
    "max_completion_length": LONG_ANSWER_TOKENS,
    "vllm_max_model_length": LONG_ANSWER_TOKENS + 1024,
    "vllm_importance_sampling_correction": False,
    "shuffle_dataset": False,
}
LORA = {"r": 8, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [26, 27, 28, 29]}


def write_rows(rows: Iterable[dict], path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def demo_config(folder: Path, **options: Any) -> TLTGRPOConfig:
    return TLTGRPOConfig(**DEFAULTS | {"output_dir": str(folder)} | options)


def demo(folder: Path, args: argparse.Namespace) -> Workload:
    policy, drafter = make_policy_and_drafter(demo_config(folder), args.warmup_tokens)
    tasks = write_rows(make_dataset("train"), folder / "demo.jsonl")
    tlt = {"drafter_model_name_or_path": drafter}
    # What counts comes after step 5, when the drafter knows the run's own answers.
    return Workload("demo", policy, tasks, REWARD, CONFIG, tlt, ENGINE, warmup_rounds=5, rounds=9)


def hard(folder: Path, args: argparse.Namespace) -> Workload:
    untuned = folder / "untuned"
    if not untuned.exists():
        for part in load_base_model(find_base_model()):
            part.save_pretrained(untuned)
    tasks = write_rows(make_dataset("train"), folder / "demo.jsonl")
    return Workload("hard", str(untuned), tasks, REWARD, CONFIG | {"temperature": 1.0}, {}, ENGINE, rounds=9)


def swap(folder: Path, args: argparse.Namespace) -> Workload:
    tasks = write_rows(make_dataset("train"), folder / "demo.jsonl")
    return Workload("swap", str(cold_started_policy()), tasks, REWARD, CONFIG, {}, ENGINE, warmup_rounds=0, rounds=40)


def long_tail(folder: Path, args: argparse.Namespace) -> Workload:
    task = TaskConfig(1, 2, 110, more_terms_probability=0.95)
    policy = str(cold_started_policy(task, ColdStartConfig(max_tokens=2 * ColdStartConfig.max_tokens)))
    config = demo_config(folder, max_completion_length=LONG_ANSWER_TOKENS)
    prompts = write_prompts(make_dataset("warmup", 512, config=task), folder / "long_tail_warmup.jsonl", 512)
    drafter = warmed_up_drafter(policy, prompts, DemoArguments(warmup_tokens=2 * args.warmup_tokens), config)
    short, long = make_dataset("train", 128, config=SHORT_TASKS), make_dataset("train", 64, config=LONG_TASKS)
    mixed = zip(short.select(range(64)), short.select(range(64, 128)), long, strict=True)
    tasks = write_rows(itertools.chain.from_iterable(mixed), folder / "long_tail.jsonl")
    tlt = {"drafter_model_name_or_path": drafter}
    return Workload("long-tail", policy, tasks, REWARD, LONG_TAIL_CONFIG, tlt, ENGINE, LORA, warmup_rounds=1, rounds=9)


WORKLOADS = {"demo": demo, "hard": hard, "swap": swap, "long-tail": long_tail}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/bench_step"))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--warmup_tokens", type=int, default=DemoArguments.warmup_tokens)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    workloads = [dataclasses.asdict(WORKLOADS[name](args.output, args)) for name in args.workloads]
    (args.output / "cases.json").write_text(json.dumps(workloads, indent=2) + "\n")


if __name__ == "__main__":
    main()
