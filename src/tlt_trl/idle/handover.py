"""
The protocol by which a sample leaves its rank and comes back, over a mailbox that may lose, delay and double messages.

    owner     SEND(sample, hop, text so far) -------------->  receiver: runs it as a guest
    owner  <--------------- FINISHED(sample, hop, whole text)  or RETURNED(sample, hop, text so far, reason)
    owner     RECALL(sample, hop) ------------------------->  receiver: drops it
    owner  <--------------------------------------- ALIVE     while guests run

SEND, FINISHED and RETURNED are numbered, sent again until they are acknowledged, and taken once. The owner counts how
often a sample has left; news of another hop than the present one is void. So a sample has one valid place at any time:
with its owner, or where its present hop has taken it, and it ends when the owner has its whole text from there.

An owner keeps what it has sent. When nothing was heard of a receiver for too long, the sample goes on from there at
home. That depends on the rank and not on the sample: a limit on how long a guest may run would favour short answers.

Nothing here sleeps, sends or reads a clock: messages go to a callable, time comes in with every call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    SEND = "send"
    FINISHED = "finished"
    RETURNED = "returned"
    RECALL = "recall"
    ALIVE = "alive"
    ACK = "ack"


NUMBERED = (Kind.SEND, Kind.FINISHED, Kind.RETURNED)


@dataclass(frozen=True, slots=True)
class Message:
    """
    What goes from one rank to another.

    Args:
        kind ([`Kind`]):
            What it says.
        sender, receiver (`int`):
            Ranks.
        version (`int`):
            Weights that the sample is being sampled with.
        sequence (`int`):
            Number of the message, or of the one that an ACK is for; 0 in messages that are not numbered.
        sample (`str`):
            Name of the sample, unique at its owner.
        hop (`int`):
            How often the sample has left its owner.
        body (`Any`):
            Its text and sampling state.
        reason (`str`):
            Why it comes back unfinished.
    """

    kind: Kind
    sender: int
    receiver: int
    version: int = 0
    sequence: int = 0
    sample: str = ""
    hop: int = 0
    body: Any = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A guest to run."""

    owner: int
    sample: str
    body: Any


@dataclass(frozen=True, slots=True)
class CameBack:
    """An own sample is here again: ended, or to go on with."""

    sample: str
    body: Any
    is_finished: bool
    rank: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A guest to drop."""

    owner: int
    sample: str


Event = Arrived | CameBack | Withdrawn


@dataclass(slots=True)
class _Away:
    receiver: int
    hop: int
    body: Any


@dataclass(slots=True)
class _Unacknowledged:
    message: Message
    sent_s: float


class Handover:
    """
    One rank's part of the protocol.

    Args:
        rank (`int`):
            This rank.
        send (`Callable[[Message], None]`):
            Puts a message into the mailbox of its receiver.
        resend_s (`float`, *optional*, defaults to `5.0`):
            Time after which a message that nobody has acknowledged is sent again.
        silence_s (`float`, *optional*, defaults to `120.0`):
            Time without a message after which a receiver counts as lost. Guests of a rank that sits in one engine step
            for so long run twice, of which the owner takes one.

    Attributes:
        lost (`set[int]`):
            Ranks that were given up.
    """

    def __init__(
        self, rank: int, send: Callable[[Message], None], resend_s: float = 5.0, silence_s: float = 120.0
    ) -> None:
        self.rank = rank
        self.resend_s = resend_s
        self.silence_s = silence_s
        self.lost: set[int] = set()
        self._send = send
        self._version = 0
        self._sequence = 0
        self._hops: dict[str, int] = {}
        self._away: dict[str, _Away] = {}
        self._guests: dict[tuple[int, str], int] = {}  # hop
        self._latest_hop: dict[tuple[int, str], int] = {}  # of samples sent here or called back in this rollout
        self._outbox: dict[int, _Unacknowledged] = {}
        self._taken: dict[int, set[int]] = {}  # sequence numbers by sender
        self._heard_s: dict[int, float] = {}
        self._told_s: dict[int, float] = {}

    @property
    def away(self) -> dict[str, int]:
        """Own samples that are elsewhere, and on which rank."""
        return {sample: away.receiver for sample, away in self._away.items()}

    @property
    def guests(self) -> set[tuple[int, str]]:
        """Owner and name of the samples that others have sent here."""
        return set(self._guests)

    @property
    def is_sending(self) -> bool:
        """Whether a sample has left and nobody has confirmed that it has arrived."""
        return any(entry.message.kind is Kind.SEND for entry in self._outbox.values())

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way: no sample elsewhere, no guest, nothing unacknowledged."""
        return not (self._away or self._guests or self._outbox)

    def start(self, version: int) -> None:
        """
        Begins a rollout with these weights.

        Raises:
            `RuntimeError`: If own samples are still elsewhere.
        """
        if self._away:
            raise RuntimeError(f"A rollout begins while samples of an earlier one are away: {self.away}.")
        self._version = version
        self._hops.clear()
        self._guests.clear()
        self._latest_hop.clear()

    # ---- the owner's side ------------------------------------------------------------------------------------------

    def send_away(self, sample: str, body: Any, receiver: int, now_s: float) -> None:
        """Sends an own sample, which must not run here any more, to another rank."""
        if receiver == self.rank or sample in self._away:
            raise ValueError(f"Sample {sample!r} cannot be sent to rank {receiver}: it is there, or away already.")
        hop = self._hops[sample] = self._hops.get(sample, 0) + 1
        self._away[sample] = _Away(receiver, hop, body)
        self._heard_s[receiver] = now_s
        self._post(Kind.SEND, receiver, sample, hop, now_s, body)

    def recall_all(self) -> None:
        """Gives up all own samples that are elsewhere: the rollout has failed here."""
        for sample in list(self._away):
            self._recall(sample)

    def _recall(self, sample: str) -> _Away:
        away = self._away.pop(sample)
        # Sent once: a guest that goes on all the same ends in a message that is void.
        self._send(Message(Kind.RECALL, self.rank, away.receiver, self._version, 0, sample, away.hop))
        return away

    # ---- the receiver's side ---------------------------------------------------------------------------------------

    def finish(self, owner: int, sample: str, body: Any, now_s: float) -> None:
        """A guest has ended."""
        self._post(Kind.FINISHED, owner, sample, self._guests.pop((owner, sample)), now_s, body)

    def give_back(self, owner: int, sample: str, body: Any, reason: str, now_s: float) -> None:
        """A guest goes home unfinished."""
        self._post(Kind.RETURNED, owner, sample, self._guests.pop((owner, sample)), now_s, body, reason)

    # ---- what comes in ---------------------------------------------------------------------------------------------

    def receive(self, message: Message, now_s: float) -> list[Event]:
        """Takes a message; returns what is to be done, in that order."""
        self._heard_s[message.sender] = now_s
        if message.kind is Kind.ACK:
            self._outbox.pop(message.sequence, None)
            return []
        if message.kind in NUMBERED:
            self._send(Message(Kind.ACK, self.rank, message.sender, message.version, message.sequence))
            taken = self._taken.setdefault(message.sender, set())
            if message.sequence in taken:
                return []
            taken.add(message.sequence)
        if message.kind is Kind.SEND:
            return self._take_in(message, now_s)
        if message.kind is Kind.RECALL:
            return self._withdraw(message)
        return [] if message.kind is Kind.ALIVE else self._welcome(message)

    def _take_in(self, message: Message, now_s: float) -> list[Event]:
        owner, sample, hop = message.sender, message.sample, message.hop
        if message.version != self._version:
            # Also a message of an earlier rollout that comes late.
            reason = f"rank {self.rank} holds weights {self._version}, not {message.version}"
            self._post(Kind.RETURNED, owner, sample, hop, now_s, message.body, reason, version=message.version)
            return []
        if hop <= self._latest_hop.get((owner, sample), 0):
            return []  # called back before it came
        self._latest_hop[owner, sample] = hop
        # One that is still here was called back, and goes on from what its owner has made of it.
        dropped: list[Event] = [Withdrawn(owner, sample)] if (owner, sample) in self._guests else []
        self._guests[owner, sample] = hop
        self._told_s[owner] = now_s
        return [*dropped, Arrived(owner, sample, message.body)]

    def _withdraw(self, message: Message) -> list[Event]:
        guest = message.sender, message.sample
        if message.version != self._version:
            return []
        self._latest_hop[guest] = max(message.hop, self._latest_hop.get(guest, 0))
        if self._guests.get(guest) != message.hop:
            return []
        del self._guests[guest]
        return [Withdrawn(*guest)]

    def _welcome(self, message: Message) -> list[Event]:
        away = self._away.get(message.sample)
        if message.version != self._version or away is None or away.hop != message.hop:
            return []
        del self._away[message.sample]
        is_finished = message.kind is Kind.FINISHED
        return [CameBack(message.sample, message.body, is_finished, message.sender, message.reason)]

    # ---- time ------------------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[CameBack]:
        """Sends again what is due, tells owners that this rank is alive, and gives up ranks that are silent."""
        for entry in self._outbox.values():
            if now_s - entry.sent_s >= self.resend_s:
                entry.sent_s = now_s
                self._send(entry.message)
        for owner in {owner for owner, _ in self._guests}:
            if now_s - self._told_s.get(owner, now_s) >= self.resend_s:
                self._told_s[owner] = now_s
                self._send(Message(Kind.ALIVE, self.rank, owner, self._version))
        recalled = []
        for sample, away in list(self._away.items()):
            if now_s - self._heard_s[away.receiver] >= self.silence_s:
                self._recall(sample)
                self._give_up(away.receiver)
                reason = f"nothing was heard of rank {away.receiver} for {self.silence_s:.0f} s"
                recalled.append(CameBack(sample, away.body, False, away.receiver, reason))
        return recalled

    def _give_up(self, rank: int) -> None:
        self.lost.add(rank)
        self._outbox = {n: entry for n, entry in self._outbox.items() if entry.message.receiver != rank}

    def _post(
        self,
        kind: Kind,
        receiver: int,
        sample: str,
        hop: int,
        now_s: float,
        body: Any,
        reason: str = "",
        version: int | None = None,
    ) -> None:
        self._sequence += 1
        version = self._version if version is None else version
        message = Message(kind, self.rank, receiver, version, self._sequence, sample, hop, body, reason)
        self._outbox[self._sequence] = _Unacknowledged(message, now_s)
        self._told_s[receiver] = now_s
        self._send(message)
