"""
Run by `test_training_state.py`: kills a process that saves checkpoints, at a random moment, and resumes; many times.

Usage: kill_script.py FOLDER NUM_KILLS SEED. Prints a line of JSON for every kill. Everything saved at step N is
filled with N, so that a mixture of two checkpoints would show as well as a torn one.
"""

import functools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig
from transformers.trainer_utils import rotate_checkpoints

from tlt_trl.drafter import Drafter, DrafterConfig
from tlt_trl.drafter.checkpoint import DrafterSnapshot
from tlt_trl.drafter.training_state import (
    CheckpointWriter,
    load_training_state,
    newest_whole_checkpoint,
    newest_whole_drafter,
    what_is_missing,
)


POLICY_CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2
)


def make_drafter() -> Drafter:
    return Drafter(DrafterConfig.from_policy_config(POLICY_CONFIG))


def rank_state(step: int) -> dict:
    optimizer = {"state": {i: {"exp_avg": torch.full((50_000,), float(step))} for i in range(4)}}
    rank = {"step": step, "buffer": [torch.full((100_000,), step, dtype=torch.bfloat16) for _ in range(4)]}
    return {"optimizer": optimizer, **rank}


def save_for_ever(output_dir: Path, step: int) -> None:
    """What the trainer does at every save: the policy's files, of which the last is not atomic, then the drafter's."""
    drafter, writer = make_drafter(), CheckpointWriter(rank=0, ranks=[0])
    while True:
        step += 1
        folder = output_dir / f"checkpoint-{step}" / "drafter"
        writer.join()
        writer.clear(folder)
        with open(folder.parent / "trainer_state.json", "w") as file:
            for part in ('{"global_step": ', str(step), "}"):
                file.write(part)
                file.flush()
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.fill_(float(step))
        rotate = functools.partial(rotate_checkpoints, str(output_dir), 2)
        writer.note_policy_saved(folder)
        writer.start(folder, rank_state(step), DrafterSnapshot.of(drafter), {"step": step}, rotate)


def resume(output_dir: Path) -> tuple[int, int]:
    """Loads the newest whole checkpoint; the step of its policy and that of its drafter, all of which is of one."""
    checkpoint = Path(newest_whole_checkpoint(output_dir))
    step = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
    assert checkpoint.name == f"checkpoint-{step}"
    folder = Path(newest_whole_drafter(checkpoint))
    drafter_step = json.loads((folder / "provenance.json").read_text())["step"]
    assert folder.parent.name == f"checkpoint-{drafter_step}"
    drafter = Drafter.from_pretrained(folder, POLICY_CONFIG)
    assert all(bool((parameter == float(drafter_step)).all()) for parameter in drafter.parameters())
    state, wanted = load_training_state(folder, 0, [0]), rank_state(drafter_step)
    for i, moments in wanted["optimizer"]["state"].items():
        assert torch.equal(state["optimizer"]["state"][i]["exp_avg"], moments["exp_avg"])
    assert state["step"] == drafter_step
    assert all(map(torch.equal, state["buffer"], wanted["buffer"]))
    return step, drafter_step


def has_saved_since(output_dir: Path, step: int) -> bool:
    """Whether a checkpoint after `step` is whole and those from before `step` are gone."""
    steps = [int(folder.name.split("-")[1]) for folder in output_dir.glob("checkpoint-*")]
    whole = [s for s in steps if (output_dir / f"checkpoint-{s}/drafter/training/complete.json").exists()]
    return max(whole, default=0) > step and min(steps) >= step


def main(output_dir: str, num_kills: str, seed: str) -> None:
    output_dir, rng, step = Path(output_dir), random.Random(int(seed)), 0
    for number in range(int(num_kills)):
        child = os.fork()
        if child == 0:
            save_for_ever(output_dir, step)
        # Before the first save there is nothing to resume from. Every other one ends a save as well: however slow the
        # disk, no more than two in a row are killed before the older checkpoints have gone.
        while number % 2 == 0 and not has_saved_since(output_dir, step):
            time.sleep(0.01)
        time.sleep(rng.uniform(0.02, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        checkpoints = list(output_dir.glob("checkpoint-*"))
        torn = sum(what_is_missing(checkpoint / "drafter") is not None for checkpoint in checkpoints)
        before, (step, drafter_step) = step, resume(output_dir)
        kill = {"before": before, "step": step, "drafter_step": drafter_step}
        print(json.dumps({**kill, "torn": torn, "checkpoints": len(checkpoints)}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
