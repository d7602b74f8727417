"""
How ranks exchange descriptions of themselves and messages: over the key-value store of the running process group.

A round of descriptions takes one `append`, one `add`, a `wait` that blocks inside the server and one `get` per rank,
however many ranks there are; a message takes one `queue_push` and one `queue_pop`. Both are done by threads that exist
only during a rollout, so the step loop looks at a flag and a deque and asks the store for nothing. Nothing polls.
"""

import pickle
import threading
from collections import deque
from datetime import timedelta

import numpy as np
from torch.distributed import DistError, PrefixStore, Store

from .handover import Message
from .reallocation import ROW_NUMBERS, Move, plan_moves
from .straggler_wait import STORE_LOST, StragglerError


# No rollout takes so long; the process group's own limit for a request to the store is shorter.
FOREVER = timedelta(days=7)

END_OF_ROLLOUT = b""


class Mailbox:
    """
    Messages to and from this rank.

    Args:
        store (`torch.distributed.Store`):
            Store of the running process group.
        rank (`int`):
            This rank.
    """

    def __init__(self, store: Store, rank: int):
        self.rank = rank
        self.bytes_sent = 0
        self.has_mail = threading.Event()
        self._store = PrefixStore("tlt_trl/mail", store)
        # A store client is locked while it waits; the thread needs one of its own.
        self._waiting_store = self._store.clone()
        self._waiting_store.set_timeout(FOREVER)
        self._inbox: deque[Message] = deque()
        self._thread: threading.Thread | None = None
        self._is_lost = False

    def start(self) -> None:
        """Begins to listen."""
        self._thread = threading.Thread(target=self._listen, name="tlt-trl mailbox", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends listening; what comes later is read when it begins again."""
        if self._thread is not None:
            self._store.queue_push(f"{self.rank}", END_OF_ROLLOUT)
            self._thread.join()
            self._thread = None

    def send(self, message: Message) -> None:
        """Puts a message into the mailbox of its receiver."""
        data = pickle.dumps(message)
        self.bytes_sent += len(data)
        self._store.queue_push(f"{message.receiver}", data)

    def take(self) -> list[Message]:
        """
        Messages that have come; never blocks.

        Raises:
            [`StragglerError`]: If the store is lost.
        """
        if self._is_lost:
            raise StragglerError(STORE_LOST)
        if not self.has_mail.is_set():
            return []
        self.has_mail.clear()
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        return messages

    def _listen(self) -> None:
        while True:
            try:
                data = self._waiting_store.queue_pop(f"{self.rank}", True)
            except DistError:
                self._is_lost = True
                self.has_mail.set()
                return
            if data == END_OF_ROLLOUT:
                return
            self._inbox.append(pickle.loads(data))
            self.has_mail.set()


class Rounds:
    """
    Rounds in which every rank describes itself, and the plan that each of them makes of it.

    A thread asks for a description by `is_due`; the step loop gives one by [`Rounds.describe`]. A rank whose step loop
    has ended leaves one for all rounds to come by [`Rounds.leave`]. The thread waits until all ranks have described
    themselves and plans: all see the same table, so all make the same plan.

    Args:
        store (`torch.distributed.Store`):
            Store of the running process group.
        rank, world_size (`int`):
            This rank, and how many there are.
        points (`np.ndarray`):
            [`~tlt_trl.idle.reallocation.horizons`] of the run.
        interval_s (`float`):
            Time between two rounds.
    """

    def __init__(self, store: Store, rank: int, world_size: int, points: np.ndarray, interval_s: float):
        self.rank = rank
        self.world_size = world_size
        self.points = points
        self.interval_s = interval_s
        self.is_due = False
        self.completed = 0  # rounds, over all rollouts
        self._store = PrefixStore("tlt_trl/rounds", store)
        self._waiting_store = self._store.clone()
        self._waiting_store.set_timeout(FOREVER)
        self._rollout = 0
        self._round = self._rounds_before = 0  # of this rollout, and of the one before
        self._thread: threading.Thread | None = None
        self._condition = threading.Condition()
        self._row: np.ndarray | None = None  # of the round that is due
        self._standing_row: np.ndarray | None = None
        self._is_over = False
        self._moves: deque[Move] = deque()

    def start(self) -> None:
        """Begins a rollout; every rank must call it."""
        if self.rank == 0 and self._rollout > 1:
            # That all ranks have ended the last rollout means that all have left the one before it.
            self._delete_rounds(self._rollout - 1, self._rounds_before)
        self._rounds_before, self._rollout, self._round = self._round, self._rollout + 1, 0
        self._row = self._standing_row = None
        self._is_over = self.is_due = False
        self._moves.clear()
        self._thread = threading.Thread(target=self._run, name="tlt-trl reallocation", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the rollout, for this rank and for the rounds of all others."""
        if self._thread is None:
            return
        with self._condition:
            self._is_over = True
            self._condition.notify_all()
        # Wakes the thread, here and on ranks that wait for a description of this one.
        for number in (self._round, self._round + 1):
            self._store.set(self._key(number, "sealed"), "over")
        self._thread.join()
        self._thread = None

    def describe(self, row: np.ndarray) -> None:
        """Gives the description that is due."""
        with self._condition:
            self._row, self.is_due = row, False
            self._condition.notify_all()

    def leave(self, row: np.ndarray) -> None:
        """The step loop is not there to describe this rank; until [`Rounds.resume`] this row does."""
        with self._condition:
            self._standing_row = row
            self._condition.notify_all()

    def resume(self) -> None:
        """The step loop is there again."""
        with self._condition:
            self._standing_row = None

    def take_moves(self) -> list[Move]:
        """Moves from this rank that were planned since the last call; never blocks."""
        moves = []
        while self._moves:
            moves.append(self._moves.popleft())
        return moves

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (row := self._next_row()) is not None and self._complete_round(row):
                pass
        except DistError:
            return  # the step loop finds out by itself

    def _next_row(self) -> np.ndarray | None:
        """This rank's description when the interval has passed; `None` when the rollout has ended."""
        with self._condition:
            if self._condition.wait_for(lambda: self._is_over, self.interval_s):
                return None
            self.is_due = self._standing_row is None
            self._condition.wait_for(lambda: self._is_over or self._row is not None or self._standing_row is not None)
            row = self._standing_row if self._row is None else self._row
            self._row, self.is_due = None, False
            return None if self._is_over else row

    def _complete_round(self, row: np.ndarray) -> bool:
        """Publishes this rank's description, waits for all others and plans; `False` when the rollout has ended."""
        self._round += 1
        sealed = self._key(self._round, "sealed")
        self._store.append(self._key(self._round, "rows"), np.concatenate([[float(self.rank)], row]).tobytes())
        if self._store.add(self._key(self._round, "count"), 1) == self.world_size:
            self._store.set(sealed, "all")
        self._waiting_store.wait([sealed], FOREVER)
        if self._is_over or self._waiting_store.get(sealed) != b"all":
            return False
        records = np.frombuffer(self._waiting_store.get(self._key(self._round, "rows")))
        table = records.reshape(self.world_size, 1 + ROW_NUMBERS)
        moves = plan_moves(table[table[:, 0].argsort(), 1:], self.points)
        self._moves.extend(move for move in moves if move.donor == self.rank)
        self.completed += 1
        if self.rank == 0 and self._round > 2:
            # That all are in this round means that all have left the one before the last.
            self._delete_round(self._rollout, self._round - 2)
        return True

    def _key(self, number: int, name: str) -> str:
        return f"{self._rollout}/{number}/{name}"

    def _delete_round(self, rollout: int, number: int) -> None:
        for name in ("rows", "count", "sealed"):
            self._store.delete_key(f"{rollout}/{number}/{name}")

    def _delete_rounds(self, rollout: int, last: int) -> None:
        for number in range(max(0, last - 2), last + 2):
            self._delete_round(rollout, number)
