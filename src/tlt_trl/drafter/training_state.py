"""
The drafter's part of a trainer checkpoint: written in the background, and recognised as whole or not.

```text
checkpoint-N/drafter/
  config.json, model.safetensors, provenance.json   what the engines load, see `checkpoint.py`
  training/policy_saved                             the policy's files of all ranks are whole
  training/rank_<i>.pt                              optimiser, random state, selector … of a rank
  training/buffer_<i>.pt                            its feature buffer, a file of its own that pushes leave out
  training/rank_<i>.failed                          in place of them when they could not be written
  training/complete.json                            written last by the rank that writes the drafter
```

Every file moves to its place when it is on the disk. The drafter is whole when `complete.json` and the files that it
names are there, and the policy when `policy_saved` is; a run killed at any byte leaves a checkpoint that lacks
something, never one that lies. What serves speed must not cost training: a run goes on from a whole policy whose
drafter is torn, with the drafter of an older checkpoint.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .checkpoint import DrafterSnapshot
from .disk import PendingFile, size_bytes, what_it_takes, write_atomically


logger = logging.getLogger(__name__)

FOLDER_NAME = "drafter"
TRAINING_NAME = "training"
COMPLETE_NAME = "complete.json"
BUFFER_KEY = "buffer"  # of a rank's state; holds prompts and answers as token ids
BUFFER_FILES = f"{FOLDER_NAME}/{TRAINING_NAME}/buffer_*.pt"  # inside a checkpoint
OF_A_RANK = ("rank_", "buffer_")
POLICY_SAVED_NAME = "policy_saved"
# Other ranks write at the same time; one that takes longer than this has most likely died.
RANKS_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class SaveFailure:
    """
    A drafter that was not saved.

    Args:
        folder (`Path`):
            Where it was to be.
        needed_bytes (`int`):
            What was to be written there.
        error (`Exception`):
            Why it was not.
    """

    folder: Path
    needed_bytes: int
    error: Exception

    def __str__(self) -> str:
        what = f"The drafter was not saved to {self.folder}: {type(self.error).__name__}: {self.error}."
        return f"{what} {what_it_takes(self.folder, self.needed_bytes)}"


class CheckpointWriter:
    """
    Writes one checkpoint at a time in a thread of its own.

    Call [`clear`] and, when the policy is saved on all ranks, [`note_policy_saved`] on the rank that writes the
    drafter, then [`start`] on each of them.

    Args:
        rank (`int`):
            This process.
        ranks (`Sequence[int]`):
            The processes that write to the same folder: all of them on a shared file system.
        report (`Callable[[SaveFailure | None], None]`, *optional*):
            Told, in that thread, how each write has ended.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        report: Callable[[SaveFailure | None], None] = lambda failure: None,
    ):
        self.rank = rank
        self.ranks = list(ranks)
        self._report = report
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter-checkpoint")
        self._pending: Future | None = None

    def clear(self, folder: str | os.PathLike) -> None:
        """
        Makes an empty folder, in place of what an interrupted run may have left there: the checkpoint counts as torn.

        Raises:
            `OSError`: If it cannot be made.
        """
        if Path(folder).exists():
            shutil.rmtree(folder)
        (Path(folder) / TRAINING_NAME).mkdir(parents=True)

    def note_policy_saved(self, folder: str | os.PathLike) -> None:
        """
        From here on a run can go on from the checkpoint, whatever becomes of its drafter.

        Raises:
            `OSError`: If that cannot be noted.
        """
        (Path(folder) / TRAINING_NAME / POLICY_SAVED_NAME).touch()

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
                Called by the rank that writes the drafter when all ranks have written or given up, for example to
                delete older checkpoints. What was not written is then tried once more.
        """
        self.join()
        arguments = (Path(folder), rank_state, drafter, provenance, then)
        self._pending = self._executor.submit(self._write, *arguments)

    def join(self) -> None:
        """Waits for the write that was begun last."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, folder: Path, rank_state, drafter, provenance, then) -> None:
        failure = self._try(folder, rank_state, drafter, provenance)
        if then is not None and self._wait_for_other_ranks(folder, rank_state is not None):
            then()
            if failure is not None:  # where checkpoints have gone there may be room now
                failure = self._try(folder, rank_state, drafter, provenance)
        self._report(failure)

    def _try(self, folder: Path, rank_state, drafter, provenance) -> SaveFailure | None:
        """The drafter first, which is worth more than what it is trained with; one may fit where both do not."""
        try:
            if drafter is not None:
                drafter.write(folder, provenance)
            failure = None if rank_state is None else self._try_state(folder, rank_state)
            if drafter is not None:
                ranks = self.ranks if rank_state is not None and failure is None else []
                _write_complete(folder, ranks)
            return failure
        except Exception as error:  # whatever it is, the policy's training is worth more
            logger.info("Traceback of a drafter that was not saved", exc_info=error)
            weights_bytes = 0 if drafter is None else size_bytes(drafter.weights)
            return SaveFailure(folder, weights_bytes + size_bytes(rank_state), error)

    def _try_state(self, folder: Path, rank_state: Mapping[str, Any]) -> SaveFailure | None:
        training = folder / TRAINING_NAME
        failed = training / f"rank_{self.rank}.failed"
        try:
            failed.unlink(missing_ok=True)
            write_atomically(_files_of_rank(training, self.rank, rank_state))
        except OSError as error:
            if training.is_dir():
                failed.touch()  # others must not wait for it
            return SaveFailure(folder, size_bytes(rank_state), error)
        return None

    def _wait_for_other_ranks(self, folder: Path, save_state: bool) -> bool:
        training = folder / TRAINING_NAME
        awaited = {rank for rank in self.ranks if save_state and rank != self.rank}
        deadline = time.monotonic() + RANKS_TIMEOUT_S
        while True:
            awaited = {rank for rank in awaited if not _has_ended(training, rank)}
            if not awaited:
                return True
            if time.monotonic() > deadline or not training.is_dir():
                logger.warning("Older checkpoints are kept: ranks %s have not saved to %s.", sorted(awaited), folder)
                return False
            time.sleep(0.05)


def _has_ended(training: Path, rank: int) -> bool:
    return any((training / f"rank_{rank}.{end}").is_file() for end in ("pt", "failed"))


def _write_complete(folder: Path, ranks: Sequence[int]) -> None:
    """Of the files that this rank has written, which are all but the states of ranks."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if not path.name.startswith(OF_A_RANK) and path.name != COMPLETE_NAME]
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(files)}
    text = json.dumps({"sizes_bytes": sizes, "ranks": list(ranks)}, indent=2)
    write_atomically([PendingFile.of_text(folder / TRAINING_NAME / COMPLETE_NAME, text)])


def cpu_copy(state: Any) -> Any:
    """Copies nested dictionaries and lists, tensors to CPU memory."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        return {name: cpu_copy(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [cpu_copy(value) for value in state]
    return state


def _files_of_rank(training: Path, rank: int, state: Mapping[str, Any]) -> list[PendingFile]:
    """The file that makes a rank's state whole comes last."""
    rest = {name: part for name, part in state.items() if name != BUFFER_KEY}
    parts = {training / f"buffer_{rank}.pt": state[BUFFER_KEY]} if BUFFER_KEY in state else {}
    parts[training / f"rank_{rank}.pt"] = rest
    return [PendingFile(path, _saver(part), _check_readable) for path, part in parts.items()]


def _load_rank(training: Path, rank: int) -> dict[str, Any]:
    """State of a rank, without its buffer where that was left out of a push."""
    state = _load(training / f"rank_{rank}.pt")
    buffer = training / f"buffer_{rank}.pt"
    return state | {BUFFER_KEY: _load(buffer)} if buffer.is_file() else state


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def _saver(state: Mapping[str, Any]) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        try:
            with path.open("wb") as file:
                torch.save(state, file)
        except RuntimeError as error:  # torch's, over the system's own that says what is wrong
            raise OSError(f"{path} was not written: {error.__context__}") from error

    return save


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
        return f"{path} is missing: the run ended while the drafter was being saved, or it could not be saved."
    complete = json.loads(path.read_text())
    for name, expected_bytes in complete["sizes_bytes"].items():
        if not (folder / name).is_file():
            return f"{folder / name} is missing."
        if (folder / name).stat().st_size != expected_bytes:
            return f"{folder / name} has {(folder / name).stat().st_size} bytes instead of {expected_bytes}."
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
        `dict[str, Any]` or `None`: State of this rank; `None` where only weights were saved, by other ranks, or not by
        all of them.
    """
    training = Path(folder) / TRAINING_NAME
    saved_ranks = json.loads((training / COMPLETE_NAME).read_text())["ranks"]
    missing = [saved for saved in saved_ranks if not (training / f"rank_{saved}.pt").is_file()]
    if saved_ranks == list(ranks) and not missing:
        return _load_rank(training, rank)
    if saved_ranks:
        logger.warning(
            "%s was written by ranks %s%s, this run has ranks %s: only the weights of the drafter are taken, its "
            "optimiser, feature buffer and selector begin anew.",
            folder,
            saved_ranks,
            f", without the state of {missing}" if missing else "",
            list(ranks),
        )
    return None


def newest_whole_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """
    The newest checkpoint of a trainer from which the policy's training can go on, names the newer ones that are torn.

    Returns:
        `str` or `None`: Folder of the checkpoint; `None` where there is no checkpoint at all.

    Raises:
        `ValueError`: If there are checkpoints and all are torn.
    """
    problems = []
    for folder in _checkpoints(Path(output_dir)):
        problem = _state_problem(folder / TRAINER_STATE_NAME) or policy_problem(folder)
        if problem is None:
            return str(folder)
        logger.warning("Not resuming from %s: %s", folder, problem)
        problems.append(problem)
    if problems:
        raise ValueError(f"No checkpoint in {output_dir} is whole. {' '.join(problems)}")
    return None


def newest_whole_drafter(checkpoint: str | os.PathLike) -> str | None:
    """
    The `drafter` folder of a checkpoint or, where that is torn, of the newest older one beside it; says so.

    Returns:
        `str` or `None`: The folder; `None` where no drafter of these is whole.
    """
    checkpoint = Path(checkpoint)
    siblings = _checkpoints(checkpoint.absolute().parent)
    older = [folder for folder in siblings if _step(folder) < _step(checkpoint)] if _is_numbered(checkpoint) else []
    for folder in (checkpoint, *older):
        if not (folder / FOLDER_NAME).is_dir():
            continue
        problem = what_is_missing(folder / FOLDER_NAME)
        if problem is None:
            return str(folder / FOLDER_NAME)
        logger.warning("The drafter of %s is not whole and is not taken: %s", folder, problem)
    return None


def _checkpoints(output_dir: Path) -> list[Path]:
    """The newest first."""
    folders = [folder for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _is_numbered(folder)]
    return sorted(folders, key=_step, reverse=True)


def _is_numbered(checkpoint: Path) -> bool:
    prefix, _, step = checkpoint.name.rpartition("-")
    return prefix == PREFIX_CHECKPOINT_DIR and step.isdigit()


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def policy_problem(checkpoint: str | os.PathLike) -> str | None:
    """Says why a run cannot go on with the policy of a checkpoint, where the drafter's part of it shows that."""
    training = Path(checkpoint) / FOLDER_NAME / TRAINING_NAME
    if not training.parent.is_dir() or (training / COMPLETE_NAME).is_file():
        return None
    path = training / POLICY_SAVED_NAME
    return None if path.is_file() else f"{path} is missing: the run ended while the policy was being saved."


def _state_problem(path: Path) -> str | None:
    """transformers writes this file last, and not atomically."""
    try:
        json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError) as error:
        return f"{path} is missing or cut off ({error}): the run ended while the policy was being saved."
    return None
