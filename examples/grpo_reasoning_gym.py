"""
GRPO with speculative rollouts on chains of additions, from nothing to a trained policy and a drafter that serves it.

    make demo
    make demo-2
    accelerate launch examples/grpo_reasoning_gym.py --output_dir runs/demo --max_steps 20
    python examples/grpo_reasoning_gym.py --output_dir runs/qwen --model Qwen/Qwen2.5-0.5B-Instruct

Without `--model` a SmolLM2-135M is cold-started by a short supervised training (cached); without
`--drafter_model_name_or_path` a drafter is warmed up on the policy's own answers (cached too). Every parameter of
`TLTGRPOConfig` can be given on the command line. It leaves `policy/`, `drafter/`, `metrics.jsonl` and `summary.json`
in the output folder and prints the summary as its last line.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoTokenizer, HfArgumentParser, TrainerCallback

import tlt_trl
from cold_start import cache_root, cold_started_policy, sha256_of
from reasoning_tasks import make_dataset, step_reward
from tlt_trl import TLTGRPOConfig, TLTGRPOTrainer
from tlt_trl.telemetry.timeline import POLICY_TRAINING, SCORING, read_timelines, seconds_by_name


# What comes out of a warm-up changes with them.
PACKAGE = Path(tlt_trl.__file__).parent
WARMUP_SOURCES = [PACKAGE / "tools" / "warmup.py", *sorted((PACKAGE / "drafter").glob("*.py"))]

# What suits a 135M policy on two CPU cores; the command line overrides each of them.
DEFAULTS = {
    "output_dir": "runs/demo",
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_max_model_length": 512,
    # A cache for 8 answers and their prompts; on CPU the default is a third of all memory.
    "vllm_engine_kwargs": {"max_num_seqs": 8, "kv_cache_memory_bytes": 2**28},
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 16,
    "num_generations": 8,
    "num_generations_eval": 2,
    "gradient_accumulation_steps": 4,
    "gradient_checkpointing": False,
    "max_completion_length": 128,
    "max_steps": 14,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 2,
    "bf16": True,
    "beta": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": not torch.cuda.is_available(),
    "seed": 0,
}


@dataclass
class DemoArguments:
    model: str | None = field(default=None, metadata={"help": "Folder or Hub id; default: a cold-started SmolLM2."})
    warmup_tokens: int = field(default=24_000, metadata={"help": "Answers to warm the drafter up with, in tokens."})
    warmup_epochs: float = field(default=3.0, metadata={"help": "Passes over them."})
    draft_vocab_size: int = field(default=2048, metadata={"help": "Reduced vocabulary of the warmed-up drafter."})
    bench_rounds: int = field(default=3, metadata={"help": "Rollouts of each engine compared at the end; 0: none."})


class MetricsFile(TrainerCallback):
    """Appends every log to `metrics.jsonl`, whatever `report_to` says, and prints one line a step."""

    COLUMNS = {
        "reward": "reward",
        "completions/mean_length": "length",
        "tlt/acceptance_length": "accepted",
        "tlt/rollout/tokens_per_s": "tok/s",
        "tlt/speculation_share": "spec",
        "tlt/drafter/time_s": "drafter_s",
        "step_time": "step_s",
    }

    def __init__(self, path: Path):
        self.path = path
        self.rows: list[dict[str, float]] = []
        self.eval_rewards: list[float] = []
        if PartialState().is_main_process:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")

    def on_log(self, args, state, control, logs, **kwargs):
        if not state.is_world_process_zero:
            return
        if "eval_reward" in logs:
            self.eval_rewards.append(float(logs["eval_reward"]))
        if "reward" not in logs:
            return
        self.rows.append({"step": state.global_step, **{k: float(v) for k, v in logs.items()}})
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")

    def table(self) -> str:
        header = "step " + " ".join(f"{name:>9}" for name in self.COLUMNS.values())
        lines = [
            f"{row['step']:4d} " + " ".join(f"{row.get(key, float('nan')):9.3f}" for key in self.COLUMNS)
            for row in self.rows
        ]
        return "\n".join([header, *lines])


def run_tool(*arguments: str) -> dict:
    """
    Runs `tlt-trl` in a process of its own and returns the JSON of its last line.

    Its engine must not share this process: its memory would stay.
    """
    environment = dict(os.environ)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # The launcher sets one thread for each of several processes; a tool runs alone.
        environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-m", "tlt_trl.tools.cli", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_prompts(dataset, path: Path, num_prompts: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = dataset.select(range(min(num_prompts, len(dataset))))
    path.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    return path


def warmed_up_drafter(model: str, prompts: Path, demo: DemoArguments, config: TLTGRPOConfig) -> str:
    """Folder of a drafter warmed up on the policy's own answers, cached by everything that it depends on."""
    inputs = [model, prompts.read_text(), demo.warmup_tokens, demo.warmup_epochs, demo.draft_vocab_size, config.seed]
    inputs += [config.max_completion_length, config.max_drafter_tokens, config.temperature]
    inputs.append(sha256_of(*WARMUP_SOURCES))
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]
    folder = cache_root() / f"drafter-{key}"
    if not (folder / "config.json").exists():
        print("Warming up the drafter on the policy's own answers", flush=True)
        partial = folder.with_suffix(".partial")
        metrics = run_tool(
            "warmup", "--model", model, "--prompts", str(prompts), "--output", str(partial),
            "--tokens", str(demo.warmup_tokens), "--epochs", str(demo.warmup_epochs),
            "--draft_vocab_size", str(demo.draft_vocab_size), "--unroll_steps", str(config.max_drafter_tokens),
            "--max_completion_length", str(config.max_completion_length), "--temperature", str(config.temperature),
            "--seed", str(config.seed),
        )  # fmt: skip
        partial.rename(folder)
        print(f"Expected acceptance length on answers held out: {metrics['acceptance_length']:.2f}", flush=True)
    return str(folder)


def bind_to_own_cores() -> None:
    """
    Gives every process of this machine its own cores, for torch and for the engine.

    Two teams of threads on the same cores wait for each other in spinning barriers and are 10 to 30 times slower.
    """
    local_rank, num_local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cores = sorted(os.sched_getaffinity(0))
    if torch.cuda.is_available() or num_local == 1 or len(cores) < num_local:
        return
    shares = [cores[rank::num_local] for rank in range(num_local)]
    os.sched_setaffinity(0, shares[local_rank])
    torch.set_num_threads(len(shares[local_rank]))
    os.environ["OMP_NUM_THREADS"] = str(len(shares[local_rank]))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)


def main() -> None:
    started = time.perf_counter()
    parser = HfArgumentParser((DemoArguments, TLTGRPOConfig))
    parser.set_defaults(**DEFAULTS)
    demo, config = parser.parse_args_into_dataclasses()
    output_dir = Path(config.output_dir)
    train_dataset = make_dataset(split="train", seed=config.seed)
    state = PartialState()
    # One process prepares what is cached; the others find it.
    with state.main_process_first():
        model = demo.model or str(cold_started_policy())
        if config.drafter_model_name_or_path is None:
            prompts = write_prompts(train_dataset, output_dir / "warmup_prompts.jsonl", 512)
            config.drafter_model_name_or_path = warmed_up_drafter(model, prompts, demo, config)

    bind_to_own_cores()
    metrics = MetricsFile(output_dir / "metrics.jsonl")
    trainer = TLTGRPOTrainer(
        model,
        step_reward,
        config,
        train_dataset,
        make_dataset(split="eval", num_examples=48, seed=config.seed),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[metrics],
    )
    # The same tasks before and after: a step's own reward depends on which tasks it drew.
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    trainer.save_model(str(output_dir / "policy"))
    if state.is_main_process:
        summary = summarise(metrics, config, demo, output_dir, train_dataset)
        summary["total_s"] = round(time.perf_counter() - started, 1)
        (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        print(metrics.table())
        print(json.dumps(summary), flush=True)


def summarise(metrics: MetricsFile, config: TLTGRPOConfig, demo: DemoArguments, output_dir: Path, dataset) -> dict:
    rows = metrics.rows
    step_s = sum(row["step_time"] for row in rows)
    summary = {
        "steps": len(rows),
        "reward_first": metrics.eval_rewards[0],
        "reward_last": metrics.eval_rewards[-1],
        "rollout_tokens_per_s": sum(row["tlt/rollout/tokens_per_s"] for row in rows) / len(rows),
        "accept_length_first": rows[0]["tlt/acceptance_length"],
        "accept_length_last": rows[-1]["tlt/acceptance_length"],
        "accepted_by_position_last": [
            rows[-1][f"tlt/acceptance/position_{position}"]
            for position in range(1, config.max_drafter_tokens + 1)
            if f"tlt/acceptance/position_{position}" in rows[-1]
        ],
        "drafter_time_share": sum(row["tlt/drafter/time_s"] for row in rows) / step_s,
        "sync_time_share": sum(row["tlt/sync/time_s"] for row in rows) / step_s,
    }
    if "tlt/idle_used_fraction" in rows[-1]:
        summary |= summarise_idle_time(rows)
    if config.log_timeline:
        seconds = seconds_by_name(read_timelines(output_dir / "timeline", last_run_only=True)[0])
        capture_s = sum(row["tlt/feature_capture_s"] for row in rows)
        # The timeline has the passes of the evaluations too, which are few and without gradients.
        summary["feature_capture_fraction"] = capture_s / (seconds[POLICY_TRAINING] + seconds[SCORING])
    if demo.bench_rounds:
        print("Comparing rollouts of the trained policy with a plain engine", flush=True)
        bench = run_tool(
            "bench", "rollout", "--model", str(output_dir / "policy"), "--drafter", str(output_dir / "drafter"),
            "--prompts", str(write_prompts(dataset, output_dir / "bench_prompts.jsonl", 32)),
            "--max_completion_length", str(config.max_completion_length), "--temperature", str(config.temperature),
            "--rounds", str(demo.bench_rounds), "--output", str(output_dir / "bench.json"),
        )  # fmt: skip
        summary |= bench
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in summary.items()}


def summarise_idle_time(rows: list[dict[str, float]]) -> dict[str, float]:
    """How the time in which ranks wait for each other is used, and what its use costs."""
    waits = [row for row in rows if "tlt/idle_used_fraction" in row]
    # There is nothing to train on before the first step has left its features.
    later = [row for row in waits if row["step"] > 1]
    idle_s = sum(row["tlt/idle_s"] for row in later)
    latencies = sorted(row["tlt/stop_latency_s"] for row in later)
    return {
        "idle_s": idle_s,
        "idle_share": idle_s / sum(row["step_time"] for row in later),
        "idle_used_fraction": sum(row["tlt/idle_used_fraction"] * row["tlt/idle_s"] for row in later) / idle_s,
        "stop_latency_s_p99": latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))],
        "added_wall_clock_fraction": sum(row["tlt/idle_added_s"] for row in later)
        / sum(row["step_time"] for row in later),
        "drafter_tokens": sum(row["tlt/drafter_tokens"] for row in rows),
    }


if __name__ == "__main__":
    main()
