"""
What saving the drafter costs a training run: seconds on the main thread, seconds of writing in the background, bytes.

Usage: python benchmarks/checkpoint_cost.py --drafter FOLDER [--buffer_tokens 65536] [--saves 5] [--output FILE.json]

The buffer is full and holds noise; the policy and its own checkpoint are left out. Every save is waited for before the
next, as in a run that saves every few steps.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tlt_trl.drafter import Drafter, DrafterTrainer, DrafterTrainingArguments, FeatureBuffer, FeatureSample
from tlt_trl.drafter.checkpoint import DrafterSnapshot, run_facts
from tlt_trl.drafter.training_state import CheckpointWriter, cpu_copy


SAMPLE_TOKENS = 256


def full_buffer(config, max_tokens: int) -> FeatureBuffer:
    buffer = FeatureBuffer(max_tokens)
    generator = torch.Generator().manual_seed(0)
    hidden_size, num_aux = config.hidden_size, config.num_aux_hidden_states
    while buffer.num_tokens + SAMPLE_TOKENS <= max_tokens:
        buffer.add(
            FeatureSample(
                input_ids=torch.randint(0, config.vocab_size, (SAMPLE_TOKENS,), generator=generator),
                aux_hidden_states=torch.randn(SAMPLE_TOKENS, num_aux * hidden_size, generator=generator).bfloat16(),
                last_hidden_state=torch.randn(SAMPLE_TOKENS, hidden_size, generator=generator).bfloat16(),
                prompt_length=32,
                step=0,
            )
        )
    return buffer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--buffer_tokens", type=int, default=65536)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    drafter = Drafter.from_pretrained(args.drafter)
    buffer = full_buffer(drafter.config, args.buffer_tokens)
    trainer = DrafterTrainer(drafter, buffer, DrafterTrainingArguments(max_tokens_per_step=256))
    embedding = torch.randn(drafter.config.vocab_size, drafter.config.hidden_size)
    trainer.set_policy(embedding, embedding)
    trainer.step()  # AdamW makes its state at the first step
    writer = CheckpointWriter(rank=0, ranks=[0])
    rows = []
    with tempfile.TemporaryDirectory() as output_dir:
        for number in range(args.saves):
            folder = Path(output_dir) / f"checkpoint-{number}" / "drafter"
            began = time.perf_counter()
            writer.clear(folder)
            rank_state = {"trainer": cpu_copy(trainer.state_dict()), "buffer": buffer.state_dict()}
            writer.start(folder, rank_state, DrafterSnapshot.of(drafter), run_facts())
            started = time.perf_counter()
            writer.join()
            written = time.perf_counter()
            size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            rows.append(
                {
                    "main_thread_s": started - began,
                    "background_s": written - started,
                    "bytes": size_bytes,
                }
            )
    summary = {
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "buffer_tokens": buffer.num_tokens,
        "main_thread_s": round(statistics.median(row["main_thread_s"] for row in rows), 4),
        "background_s": round(statistics.median(row["background_s"] for row in rows), 3),
        "megabytes": round(rows[-1]["bytes"] / 1e6, 1),
    }
    if args.output is not None:
        args.output.write_text(json.dumps({"summary": summary, "saves": rows}, indent=2) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
