"""Writing files that are whole or not there, and saying what a disk lacks when they cannot be written."""

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


# What file systems over a network or in user space answer when they cannot do what `fsync` asks for, and what others
# answer to opening a folder or syncing one. PostgreSQL passes over the same (`fsync_fname_ext`). A disk that is full
# or broken answers something else.
CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
CANNOT_SYNC_FOLDER = CANNOT_SYNC | {errno.EBADF, errno.EACCES, errno.EISDIR}


@dataclass(frozen=True)
class PendingFile:
    """
    A file to be written beside its place and then moved there.

    Args:
        path (`Path`):
            Its place.
        write (`Callable[[Path], Any]`):
            Writes its content to the path that it is given.
        verify (`Callable[[Path], None]`):
            Raises unless that is what can be read there.
    """

    path: Path
    write: Callable[[Path], Any]
    verify: Callable[[Path], None]

    @property
    def partial(self) -> Path:
        return self.path.with_name(f"{self.path.name}.partial")

    @classmethod
    def of_text(cls, path: Path, text: str) -> "PendingFile":
        """A text, which gets a line end."""
        text = text.rstrip("\n") + "\n"

        def verify(partial: Path) -> None:
            if partial.read_text() != text:
                raise OSError(f"{partial} does not hold what was written to it.")

        return cls(path, lambda partial: partial.write_text(text), verify)


def write_atomically(files: Sequence[PendingFile]) -> None:
    """
    Writes files of one folder beside their places, reads them back, and moves them there once all are on the disk.

    A full disk or a broken network file system shows here, not at the next start, and leaves what was there before
    and nothing else. Who reads one of the files finds either nothing, the predecessor or the whole file, at whatever
    byte the writing stops.
    """
    try:
        for file in files:
            file.write(file.partial)
            file.verify(file.partial)
            flush(file.partial)
        for file in files:
            file.partial.replace(file.path)
    finally:
        for file in files:
            file.partial.unlink(missing_ok=True)  # on a full disk its bytes are what the policy's next files lack
    flush(files[0].path.parent)  # the folder is what remembers the new names


def flush(path: Path) -> None:
    """Returns when a file or folder is on the disk, or at once where the file system has no way to ask for that."""
    passed_over = CANNOT_SYNC_FOLDER if path.is_dir() else CANNOT_SYNC
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in passed_over:
            raise


def size_bytes(state: Any) -> int:
    """Bytes of all tensors in nested dictionaries and lists."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    return sum(map(size_bytes, _children(state)))


def _children(state: Any) -> Iterator[Any]:
    if isinstance(state, Mapping):
        yield from state.values()
    elif isinstance(state, list | tuple):
        yield from state


def free_bytes(folder: str | os.PathLike) -> int:
    """Free for this user in the file system of a folder, or of the nearest one above that is there."""
    path = Path(folder).absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    stats = os.statvfs(path)
    return stats.f_bavail * stats.f_frsize


def what_it_takes(folder: str | os.PathLike, needed_bytes: int) -> str:
    """What has to be written to a folder and what is free there, in words."""
    return (
        f"It takes {needed_bytes} bytes, and {free_bytes(folder)} are free in {folder}. "
        f"TMPDIR, for temporary files, is {os.environ.get('TMPDIR', 'not set')}."
    )
