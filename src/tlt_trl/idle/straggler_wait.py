"""
Who has finished its rollout? Asked of the key-value store of the running process group, without a collective.

A rank whose engine is done announces it and may use its time until the last rank is done; a blocking collective would
hold it instead. The store works across nodes, needs no extra port, and is asked at most eight times per rank and
rollout, however many ranks there are: one `set` (two by the last rank), one `add`, one `wait` that blocks inside the
server, one `get`, and one `delete_key` (three by rank 0) for the round before the last one. Nothing polls.
"""

import threading
import time
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store


STORE_LOST = (
    "The key-value store of the process group cannot be reached any more: the process that hosts it has died. That is "
    "rank 0 or, under `accelerate launch` and `torchrun`, the launcher of the first machine; its log says why."
)

# How long rank 0, which may host the store, stays after a deadline: the others read there whom it waited for.
FAREWELL_S = 1.0


class StragglerError(RuntimeError):
    """Ranks did not finish their rollout within the deadline, or the store went away with one of them."""


class StragglerWait:
    """
    One per rank; all ranks call [`announce`] once for every rollout.

    Args:
        store (`torch.distributed.Store`):
            Store of the running process group.
        rank (`int`):
            This rank.
        world_size (`int`):
            Number of ranks.
        timeout_s (`float`, *optional*, defaults to `1800.0`):
            Deadline for the last rank, counted from this rank's announcement.
        group_size (`int`, *optional*, defaults to `1`):
            Ranks that share one engine (tensor parallelism): consecutive ones, of which the first announces for all.
            An engine's samples are unfinished on all of them or on none.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float = 1800.0, group_size: int = 1):
        if world_size % group_size:
            raise ValueError(f"world_size={world_size} must be a multiple of group_size={group_size}.")
        self.rank = rank
        self.group_size = group_size
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._store = PrefixStore("tlt_trl/straggler_wait", store)
        # A store client is locked while it waits; the watching thread needs one of its own.
        self._watched_store = self._store.clone()
        self._round = 0
        self._finished = threading.Event()
        self.finished_at_s = 0.0  # `time.perf_counter()` when the last rank was seen to be done; meaningless before
        self._failure: str | None = None
        self._watcher: threading.Thread | None = None

    def announce(self) -> None:
        """Tells all ranks that this one has no unfinished sample left, and begins to watch for the others."""
        self._round += 1
        self._finished.clear()
        self._failure = None
        try:
            self._announce_round()
        except DistError as error:
            raise StragglerError(STORE_LOST) from error

    def _announce_round(self) -> None:
        if self.rank % self.group_size == 0:
            self._store.set(f"{self._round}/rank/{self.rank}", "")
            if self._store.add(f"{self._round}/count", 1) == self.world_size // self.group_size:
                self._store.set(f"{self._round}/all", "")
                self._finish()
        if not self.all_finished():
            self._watcher = threading.Thread(target=self._watch, args=(self._round,), daemon=True)
            self._watcher.start()
        self._delete_round(self._round - 2)

    def all_finished(self) -> bool:
        """Whether every rank has announced itself; never blocks."""
        return self._finished.is_set()

    def join(self) -> None:
        """
        Blocks until every rank has announced itself.

        Raises:
            [`StragglerError`]: If the deadline of a rank passed; the message names the ranks that are missing.
        """
        self._finished.wait()
        if self._failure is not None:
            if self.rank == 0:
                time.sleep(FAREWELL_S)
            raise StragglerError(self._failure)

    def _watch(self, round_number: int) -> None:
        key = f"{round_number}/all"
        try:
            self._watched_store.wait([key], timedelta(seconds=self.timeout_s))
            # Empty, or what the first rank whose deadline passed has found: all ranks end with it, at once.
            self._failure = self._watched_store.get(key).decode() or None
        except DistError:
            self._failure = self._report_missing(key)
        self._finish()

    def _finish(self) -> None:
        self.finished_at_s = time.perf_counter()
        self._finished.set()

    def _report_missing(self, key: str) -> str:
        leaders = range(0, self.world_size, self.group_size)
        try:
            silent = [rank for rank in leaders if not self._watched_store.check([f"{self._round}/rank/{rank}"])]
            missing = [rank for leader in silent for rank in range(leader, leader + self.group_size)]
            message = (
                f"Rank {self.rank} waited {self.timeout_s:.0f} s for the rollouts of ranks {missing}, which did not "
                "finish. They have died or hang; their logs say why. If rollouts may take longer, raise `ddp_timeout`."
            )
            self._watched_store.set(key, message)
        except DistError:
            return STORE_LOST
        return message

    def _delete_round(self, round_number: int) -> None:
        # Entering a round means that all ranks have left the one before it, so nobody reads the round before that.
        if round_number < 1 or self.rank % self.group_size:
            return
        self._store.delete_key(f"{round_number}/rank/{self.rank}")
        if self.rank == 0:
            self._store.delete_key(f"{round_number}/count")
            self._store.delete_key(f"{round_number}/all")
