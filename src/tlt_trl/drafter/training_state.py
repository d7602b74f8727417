"""
The drafter's part of a trainer checkpoint: written in the background, and recognised as whole or not.

```text
checkpoint-N/drafter/
  config.json, model.safetensors, provenance.json   what the engines load, see `checkpoint.py`
  training/rank_<i>.pt                              optimiser, random state, selector … of a rank
  training/buffer_<i>.pt                            its feature buffer, a file of its own that pushes leave out
  training/complete.json                            written last by the rank that writes the drafter
```

Every file moves to its place when it is on the disk, so a checkpoint is whole when `complete.json` and the files that
it names are there; a run killed at any byte leaves one that lacks something, never one that lies.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .checkpoint import DrafterSnapshot, write_atomically, write_text_atomically


logger = logging.getLogger(__name__)

FOLDER_NAME = "drafter"
TRAINING_NAME = "training"
COMPLETE_NAME = "complete.json"
BUFFER_KEY = "buffer"  # of a rank's state; holds prompts and answers as token ids
BUFFER_FILES = f"{FOLDER_NAME}/{TRAINING_NAME}/buffer_*.pt"  # inside a checkpoint
OF_A_RANK = ("rank_", "buffer_")
# Other ranks write at the same time; one that takes longer than this has most likely died.
RANKS_TIMEOUT_S = 600.0


class CheckpointWriter:
    """
    Writes one checkpoint at a time in a thread of its own.

    Call [`clear`] on the rank that writes the drafter, let all ranks meet, then [`start`] on each of them. Errors are
    logged when they happen and raised by the next [`join`].

    Args:
        rank (`int`):
            This process.
        ranks (`Sequence[int]`):
            The processes that write to the same folder: all of them on a shared file system.
    """

    def __init__(self, rank: int, ranks: Sequence[int]):
        self.rank = rank
        self.ranks = list(ranks)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter-checkpoint")
        self._pending: Future | None = None

    def clear(self, folder: str | os.PathLike) -> None:
        """Makes an empty folder, in place of what an interrupted run may have left there."""
        shutil.rmtree(folder, ignore_errors=True)
        (Path(folder) / TRAINING_NAME).mkdir(parents=True)

    def start(
        self,
        folder: str | os.PathLike,
        rank_state: Mapping[str, Any] | None,
        drafter: DrafterSnapshot | None = None,
        provenance: Mapping[str, Any] | None = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """
        Begins to write. Nothing that is passed in may change afterwards.

        Args:
            folder (`str` or `os.PathLike`):
                The checkpoint's `drafter` folder. It is not made again when somebody deletes it meanwhile.
            rank_state (`Mapping[str, Any]`, *optional*):
                State of this rank. `None` saves weights only.
            drafter ([`~tlt_trl.drafter.checkpoint.DrafterSnapshot`], *optional*):
                The drafter, on the rank that writes it.
            provenance (`Mapping[str, Any]`, *optional*):
                Content of `provenance.json`.
            then (`Callable[[], None]`, *optional*):
                Called by the rank that writes the drafter when the files of all ranks are there, for example to delete
                older checkpoints.
        """
        self.join()
        arguments = (Path(folder), rank_state, drafter, provenance, then)
        self._pending = self._executor.submit(self._write, *arguments)

    def join(self) -> None:
        """Waits for the write that was begun last and raises what went wrong in it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, folder: Path, rank_state, drafter, provenance, then) -> None:
        try:
            if rank_state is not None:
                _save_rank(folder / TRAINING_NAME, self.rank, rank_state)
            if drafter is None:
                return
            drafter.write(folder, provenance)
            files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(OF_A_RANK)]
            complete = {
                "sizes_bytes": {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)},
                "ranks": self.ranks if rank_state is not None else [],
            }
            write_text_atomically(folder / TRAINING_NAME / COMPLETE_NAME, json.dumps(complete, indent=2))
            if then is not None and self._wait_for_other_ranks(folder):
                then()
        except Exception:
            logger.exception("The drafter was not saved to %s. The error is raised at the next save.", folder)
            raise

    def _wait_for_other_ranks(self, folder: Path) -> bool:
        deadline = time.monotonic() + RANKS_TIMEOUT_S
        while problem := what_is_missing(folder):
            if time.monotonic() > deadline:
                logger.warning("Older checkpoints are kept: %s", problem)
                return False
            time.sleep(0.05)
        return True


def cpu_copy(state: Any) -> Any:
    """Copies nested dictionaries and lists, tensors to CPU memory."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        return {name: cpu_copy(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [cpu_copy(value) for value in state]
    return state


def _save_rank(training: Path, rank: int, state: Mapping[str, Any]) -> None:
    """The file that makes a rank's state whole comes last."""
    if BUFFER_KEY in state:
        _save(training / f"buffer_{rank}.pt", state[BUFFER_KEY])
    _save(training / f"rank_{rank}.pt", {name: part for name, part in state.items() if name != BUFFER_KEY})


def _load_rank(training: Path, rank: int) -> dict[str, Any]:
    """State of a rank, without its buffer where that was left out of a push."""
    state = _load(training / f"rank_{rank}.pt")
    buffer = training / f"buffer_{rank}.pt"
    return state | {BUFFER_KEY: _load(buffer)} if buffer.is_file() else state


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def _save(path: Path, state: Mapping[str, Any]) -> None:
    write_atomically(path, lambda partial: torch.save(state, partial), _check_readable)


def _check_readable(path: Path) -> None:
    """The archive's directory is at its end: where it can be read, nothing is cut off."""
    torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def what_is_missing(folder: str | os.PathLike) -> str | None:
    """
    Says why the drafter of a checkpoint cannot be loaded, or `None` when it is whole.

    Args:
        folder (`str` or `os.PathLike`):
            The checkpoint's `drafter` folder.
    """
    folder = Path(folder)
    path = folder / TRAINING_NAME / COMPLETE_NAME
    if not path.is_file():
        return f"{path} is missing: the run ended while the drafter was being saved."
    complete = json.loads(path.read_text())
    for name, size_bytes in complete["sizes_bytes"].items():
        if not (folder / name).is_file():
            return f"{folder / name} is missing."
        if (folder / name).stat().st_size != size_bytes:
            return f"{folder / name} has {(folder / name).stat().st_size} bytes instead of {size_bytes}."
    for rank in complete["ranks"]:
        if not (folder / TRAINING_NAME / f"rank_{rank}.pt").is_file():
            return f"{folder / TRAINING_NAME / f'rank_{rank}.pt'} is missing: rank {rank} ended before it was saved."
    return None


def load_training_state(folder: str | os.PathLike, rank: int, ranks: Sequence[int]) -> dict[str, Any] | None:
    """
    Reads what [`CheckpointWriter`] wrote beside the weights.

    Args:
        folder (`str` or `os.PathLike`):
            The checkpoint's `drafter` folder, whole.
        rank (`int`):
            This process.
        ranks (`Sequence[int]`):
            As in [`CheckpointWriter`].

    Returns:
        `dict[str, Any]` or `None`: State of this rank; `None` where only weights were saved, or by other ranks.
    """
    training = Path(folder) / TRAINING_NAME
    saved_ranks = json.loads((training / COMPLETE_NAME).read_text())["ranks"]
    if saved_ranks == list(ranks):
        return _load_rank(training, rank)
    if saved_ranks:
        logger.warning(
            "%s was written by ranks %s, this run has ranks %s: only the weights of the drafter are taken, its "
            "optimiser, feature buffer and selector begin anew.",
            folder,
            saved_ranks,
            list(ranks),
        )
    return None


def newest_whole_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """
    The newest checkpoint of a trainer from which a run can go on, names the newer ones that are torn.

    transformers writes `trainer_state.json` after the policy, its optimiser and the random state, and the drafter
    comes after that, so a checkpoint with both has everything.

    Returns:
        `str` or `None`: Folder of the checkpoint; `None` where there is no checkpoint at all.

    Raises:
        `ValueError`: If there are checkpoints and all are torn.
    """
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    folders = [folder for folder in Path(output_dir).glob(f"{prefix}*") if folder.name.removeprefix(prefix).isdigit()]
    problems = []
    for folder in sorted(folders, key=lambda folder: int(folder.name.removeprefix(prefix)), reverse=True):
        problem = _state_problem(folder / TRAINER_STATE_NAME)
        if problem is None and (folder / FOLDER_NAME).is_dir():
            problem = what_is_missing(folder / FOLDER_NAME)
        if problem is None:
            return str(folder)
        logger.warning("Not resuming from %s: %s", folder, problem)
        problems.append(problem)
    if problems:
        raise ValueError(f"No checkpoint in {output_dir} is whole. {' '.join(problems)}")
    return None


def _state_problem(path: Path) -> str | None:
    """transformers writes this file last, and not atomically."""
    try:
        json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        return f"{path} is missing or cut off ({error}): the run ended while the policy was being saved."
    return None
