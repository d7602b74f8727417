"""The demo's trainer for benchmarks that train: its policy, drafter, tasks and defaults, with some options changed."""

import sys
from pathlib import Path

from transformers import AutoTokenizer, TrainerCallback


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from cold_start import cold_started_policy  # noqa: E402
from grpo_reasoning_gym import DEFAULTS, DemoArguments, warmed_up_drafter, write_prompts  # noqa: E402
from reasoning_tasks import make_dataset, step_reward  # noqa: E402
from tlt_trl import TLTGRPOConfig, TLTGRPOTrainer  # noqa: E402


def make_config(folder: str, seed: int, **options) -> tuple[str, TLTGRPOConfig]:
    """The policy's folder and the demo's configuration with its warmed-up drafter; both are cached."""
    config = TLTGRPOConfig(**DEFAULTS | {"output_dir": folder, "seed": seed} | options)
    model = str(cold_started_policy())
    prompts = write_prompts(make_dataset(split="train", seed=seed), Path(folder) / "prompts.jsonl", 512)
    config.drafter_model_name_or_path = warmed_up_drafter(model, prompts, DemoArguments(), config)
    return model, config


def make_trainer(
    model: str, config: TLTGRPOConfig, callbacks: list[TrainerCallback], num_eval_tasks: int
) -> TLTGRPOTrainer:
    return TLTGRPOTrainer(
        model,
        step_reward,
        config,
        make_dataset(split="train", seed=config.seed),
        make_dataset(split="eval", num_examples=num_eval_tasks, seed=config.seed),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=callbacks,
    )
