"""The demo's trainer for benchmarks that train: its policy, drafter and tasks."""

import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from cold_start import cold_started_policy  # noqa: E402
from grpo_reasoning_gym import DemoArguments, warmed_up_drafter, write_prompts  # noqa: E402
from reasoning_tasks import make_dataset, step_reward  # noqa: E402
from tlt_trl import TLTGRPOConfig, TLTGRPOTrainer  # noqa: E402


def make_policy_and_drafter(
    config: TLTGRPOConfig, warmup_tokens: int = DemoArguments.warmup_tokens
) -> tuple[str, str]:
    """Folders of the demo's policy and of a drafter warmed up on it; what is cached is taken."""
    policy = str(cold_started_policy())
    tasks = make_dataset(split="train", seed=config.seed)
    prompts = write_prompts(tasks, Path(config.output_dir) / "prompts.jsonl", 512)
    return policy, warmed_up_drafter(policy, prompts, DemoArguments(warmup_tokens=warmup_tokens), config)


def make_trainer(
    policy: str,
    config: TLTGRPOConfig,
    callbacks: list[TrainerCallback],
    num_eval_tasks: int,
    tasks: Dataset | None = None,
) -> TLTGRPOTrainer:
    """The demo's trainer, on other tasks where some are given."""
    return TLTGRPOTrainer(
        policy,
        step_reward,
        config,
        make_dataset(split="train", seed=config.seed) if tasks is None else tasks,
        make_dataset(split="eval", num_examples=num_eval_tasks, seed=config.seed),
        processing_class=AutoTokenizer.from_pretrained(policy),
        callbacks=callbacks,
    )
