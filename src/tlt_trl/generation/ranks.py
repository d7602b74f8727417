"""What the ranks of a run do together when an engine is built and its weights are pushed: one writes, all fail."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..drafter.disk import free_bytes, size_bytes, what_it_takes
from ..drafter.modeling_drafter import Drafter


class OtherRankFailedError(RuntimeError):
    """What this rank did went well, but another one cannot go on."""


def failures_of_ranks(accelerator: Accelerator, failure: str) -> str:
    """
    What has failed on any rank; every rank must call it.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Of the run.
        failure (`str`):
            What has failed on this rank; empty if nothing has.

    Returns:
        `str`: The failures of all ranks, with their numbers where there are several ranks. Empty if nothing failed.
    """
    if accelerator.num_processes == 1:
        return failure
    # Objects are sent in an emergency only.
    failed = accelerator.reduce(torch.tensor([float(bool(failure))], device=accelerator.device), "sum")
    if not failed.item():
        return ""
    failures = gather_object([failure])
    return "\n".join(f"Rank {rank}: {text}" for rank, text in enumerate(failures) if text)


@contextmanager
def failing_together(accelerator: Accelerator) -> Iterator[None]:
    """
    Lets no rank leave the context when one of them cannot: it would wait for that one in its next collective.

    Raises:
        [`OtherRankFailedError`]: If another rank failed and this one did not; the message has the reason.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as own:
        error = own
    failures = failures_of_ranks(accelerator, "" if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    if failures:
        raise OtherRankFailedError(f"All ranks end because some cannot go on:\n{failures}")


@contextmanager
def drafter_folder(drafter: Drafter, accelerator: Accelerator) -> Iterator[str]:
    """
    Folder from which the engines of this machine load the drafter, written by one rank; every rank must enter.

    A rank must not leave before all ranks of its machine have read.

    Raises:
        `OSError`: If the disk is too small, or a rank does not see what the first rank of its machine has written.
    """
    writes = accelerator.is_local_main_process
    with tempfile.TemporaryDirectory(prefix="tlt-trl-drafter-") if writes else nullcontext() as own:
        with failing_together(accelerator):
            if own is not None:
                save_for_engine(drafter, own)
        folder = gather_object([own])[accelerator.process_index - accelerator.local_process_index]
        if not os.path.isdir(folder):
            raise OSError(
                f"{folder}, where the first rank of this machine has written the drafter, is not visible to rank "
                f"{accelerator.process_index}. Set the environment variable TMPDIR to a folder that all ranks see."
            )
        yield folder


def save_for_engine(drafter: Drafter, folder: str | os.PathLike) -> None:
    """
    Saves the drafter where the engine loads it from.

    Raises:
        `OSError`: If the disk is too small; the message names the folder, what is needed and what is free.
    """
    needed_bytes = sum(size_bytes(tensor) for _, tensor in drafter.vllm_weights())
    try:
        if free_bytes(folder) < needed_bytes:
            raise OSError("There is not enough room.")
        drafter.save_pretrained(folder)
    except OSError as error:
        raise OSError(
            f"The drafter that the engine loads was not saved to {Path(folder).parent}: {error} "
            f"{what_it_takes(folder, needed_bytes)} Set TMPDIR to a folder with more room."
        ) from error
