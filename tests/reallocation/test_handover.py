"""The protocol against a network that loses, delays and doubles messages, and against ranks that die."""

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tlt_trl.idle.handover import Arrived, CameBack, Handover, Kind, Message, Withdrawn


RESEND_S, SILENCE_S = 1.0, 10.0
NUM_RANKS, SAMPLES_PER_RANK = 3, 3


class Wire:
    """Ranks and what is on its way between them."""

    def __init__(self, num_ranks=2):
        self.messages: list[Message] = []
        self.ranks = [Handover(rank, self.messages.append, RESEND_S, SILENCE_S) for rank in range(num_ranks)]
        self.now_s = 0.0
        for rank in self.ranks:
            rank.start(version=1)

    def deliver(self, position=0):
        message = self.messages.pop(position)
        return self.ranks[message.receiver].receive(message, self.now_s)

    def deliver_all(self):
        events = []
        while self.messages:
            events += self.deliver()
        return events


def test_a_sample_goes_out_and_comes_back_finished():
    wire = Wire()
    owner, receiver = wire.ranks
    owner.send_away("a", "text", 1, 0.0)
    assert owner.away == {"a": 1}
    assert wire.deliver() == [Arrived(0, "a", "text")]
    assert receiver.guests == {(0, "a")}
    receiver.finish(0, "a", "text and more", 1.0)
    assert wire.deliver_all() == [CameBack("a", "text and more", is_finished=True, rank=1)]
    assert owner.is_settled and receiver.is_settled


def test_a_full_receiver_returns_it_unharmed():
    wire = Wire()
    wire.ranks[0].send_away("a", "text", 1, 0.0)
    wire.deliver_all()
    wire.ranks[1].give_back(0, "a", "text", "full", 0.0)
    assert wire.deliver_all() == [CameBack("a", "text", is_finished=False, rank=1, reason="full")]
    wire.ranks[0].send_away("a", "text", 1, 0.0)  # it may try again
    assert wire.deliver_all() == [Arrived(0, "a", "text")]


def test_a_lost_message_is_sent_again_and_a_doubled_one_taken_once():
    wire = Wire()
    wire.ranks[0].send_away("a", "text", 1, 0.0)
    lost = wire.messages.pop()
    assert wire.ranks[0].tick(RESEND_S - 0.1) == [] and wire.messages == []
    wire.ranks[0].tick(RESEND_S)
    assert wire.messages == [lost]
    wire.messages.append(lost)
    assert wire.deliver_all() == [Arrived(0, "a", "text")]
    wire.ranks[0].tick(10 * RESEND_S - 0.1)
    assert wire.messages == []  # acknowledged


def test_other_weights_are_refused():
    wire = Wire()
    wire.ranks[1].start(version=2)
    wire.ranks[0].send_away("a", "text", 1, 0.0)
    (event,) = wire.deliver_all()
    assert event == CameBack("a", "text", False, 1, "rank 1 holds weights 2, not 1")
    assert wire.ranks[1].guests == set()


def test_a_silent_rank_is_given_up_and_what_comes_later_is_void():
    wire = Wire()
    owner, receiver = wire.ranks
    owner.send_away("a", "text", 1, 0.0)
    wire.deliver_all()
    assert owner.tick(SILENCE_S - 0.1) == []
    (event,) = owner.tick(SILENCE_S)
    assert (event.sample, event.body, event.is_finished) == ("a", "text", False)
    assert "rank 1" in event.reason and owner.lost == {1}
    wire.messages.clear()  # the recall is lost
    receiver.finish(0, "a", "other text", SILENCE_S)
    assert wire.deliver_all() == [] and owner.away == {}


def test_a_guest_that_takes_long_is_not_given_up():
    wire = Wire()
    owner, receiver = wire.ranks
    owner.send_away("a", "text", 1, 0.0)
    wire.deliver_all()
    for second in range(1, 100):
        wire.now_s = float(second)
        receiver.tick(wire.now_s)
        wire.deliver_all()
        assert owner.tick(wire.now_s) == []


def test_a_recalled_guest_is_dropped_also_when_the_recall_comes_first():
    wire = Wire()
    wire.ranks[0].send_away("a", "text", 1, 0.0)
    wire.deliver_all()
    wire.ranks[0].recall_all()
    assert wire.deliver_all() == [Withdrawn(0, "a")]
    wire.ranks[0].send_away("a", "text", 1, 0.0)
    wire.ranks[0].recall_all()
    wire.messages.reverse()
    assert wire.deliver_all() == []


def test_a_sample_that_is_away_cannot_leave_again():
    wire = Wire()
    wire.ranks[0].send_away("a", "text", 1, 0.0)
    with pytest.raises(ValueError, match="'a'"):
        wire.ranks[0].send_away("a", "text", 1, 0.0)
    with pytest.raises(ValueError, match="rank 0"):
        wire.ranks[0].send_away("b", "text", 0, 0.0)
    with pytest.raises(RuntimeError, match="'a': 1"):
        wire.ranks[0].start(version=2)


class RandomSchedules(RuleBasedStateMachine):
    """
    Ranks with samples that anything may happen to.

    The text of a sample is a tuple of numbers that are never used twice, so that a text which was put together
    from two lines of sampling would show. Where a sample runs, `texts` of that rank has it.
    """

    @initialize()
    def begin(self):
        self.wire = Wire(NUM_RANKS)
        self.texts: list[dict] = [{(rank, f"s{n}"): () for n in range(SAMPLES_PER_RANK)} for rank in range(NUM_RANKS)]
        self.ended: list[dict] = [{} for _ in range(NUM_RANKS)]
        self.next_token = 0
        self.parent = {}  # token -> the one that it was sampled behind
        self.dead: set[int] = set()

    def alive(self):
        return [rank for rank in range(NUM_RANKS) if rank not in self.dead]

    def running(self):
        return sorted((rank, *key) for rank in self.alive() for key in self.texts[rank])

    def act_on(self, rank, events):
        for event in events:
            if isinstance(event, Arrived):
                assert (event.owner, event.sample) not in self.texts[rank]
                self.texts[rank][event.owner, event.sample] = event.body
            elif isinstance(event, Withdrawn):
                del self.texts[rank][event.owner, event.sample]
            elif event.is_finished:
                self.end(rank, event.sample, event.body)
            else:
                assert (rank, event.sample) not in self.texts[rank]
                self.texts[rank][rank, event.sample] = event.body

    def end(self, rank, sample, text):
        assert sample not in self.ended[rank], "ended twice"
        for before, after in zip((None, *text), text, strict=False):
            assert self.parent[after] == before, "two texts were mixed"
        self.ended[rank][sample] = text

    def handover(self, rank):
        return self.wire.ranks[rank]

    # ---- what may happen -------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def sample_a_token(self, data):
        if self.running():
            rank, *key = data.draw(st.sampled_from(self.running()))
            text = self.texts[rank][tuple(key)]
            self.next_token += 1
            self.parent[self.next_token] = text[-1] if text else None
            self.texts[rank][tuple(key)] = (*text, self.next_token)

    @rule(data=st.data())
    def end_a_sample(self, data):
        if self.running():
            self.finish(*data.draw(st.sampled_from(self.running())))

    def finish(self, rank, owner, sample):
        text = self.texts[rank].pop((owner, sample))
        if owner == rank:
            self.end(rank, sample, text)
        else:
            self.handover(rank).finish(owner, sample, text, self.wire.now_s)

    @rule(data=st.data(), to=st.integers(0, NUM_RANKS - 1))
    def move_a_sample(self, data, to):
        own = [(rank, sample) for rank, owner, sample in self.running() if rank == owner != to]
        if own:
            rank, sample = data.draw(st.sampled_from(own))
            self.handover(rank).send_away(sample, self.texts[rank].pop((rank, sample)), to, self.wire.now_s)

    @rule(data=st.data())
    def return_a_guest(self, data):
        guests = [(rank, owner, sample) for rank, owner, sample in self.running() if rank != owner]
        if guests:
            rank, owner, sample = data.draw(st.sampled_from(guests))
            text = self.texts[rank].pop((owner, sample))
            self.handover(rank).give_back(owner, sample, text, "full", self.wire.now_s)

    def take_message(self, data):
        return data.draw(st.integers(0, len(self.wire.messages) - 1)) if self.wire.messages else None

    @rule(data=st.data())
    def deliver(self, data):
        if (position := self.take_message(data)) is not None:
            self.deliver_at(position)

    def deliver_at(self, position):
        receiver = self.wire.messages[position].receiver
        if receiver in self.dead:
            self.wire.messages.pop(position)
        else:
            self.act_on(receiver, self.wire.deliver(position))

    @rule(data=st.data())
    def lose(self, data):
        if (position := self.take_message(data)) is not None:
            self.wire.messages.pop(position)

    @rule(data=st.data())
    def double(self, data):
        if (position := self.take_message(data)) is not None:
            self.wire.messages.append(dataclasses.replace(self.wire.messages[position]))

    @rule(seconds=st.sampled_from([0.5, 1.5, 4.0, 11.0]))
    def wait(self, seconds):
        self.wire.now_s += seconds
        for rank in self.alive():
            self.act_on(rank, self.handover(rank).tick(self.wire.now_s))

    @rule(rank=st.integers(0, NUM_RANKS - 1), chance=st.integers(0, 9))
    def die(self, rank, chance):
        if chance == 0 and len(self.alive()) > 1:
            self.dead.add(rank)

    @rule(rank=st.integers(0, NUM_RANKS - 1), chance=st.integers(0, 9))
    def fail_with_guests(self, rank, chance):
        """An exception while guests run: all of them go home."""
        if chance == 0 and rank not in self.dead:
            for owner, sample in self.handover(rank).guests:
                text = self.texts[rank].pop((owner, sample))
                self.handover(rank).give_back(owner, sample, text, "failed", self.wire.now_s)

    # ---- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def what_runs_is_what_the_protocol_knows(self):
        for rank in self.alive():
            handover = self.handover(rank)
            assert handover.guests == {key for key in self.texts[rank] if key[0] != rank}
            for n in range(SAMPLES_PER_RANK):
                sample = f"s{n}"
                is_here = (rank, sample) in self.texts[rank]
                assert is_here + (sample in handover.away) + (sample in self.ended[rank]) == 1

    def teardown(self):
        """From here on nothing is lost: everything ends, within a bounded time."""
        for _ in range(60):
            for rank, owner, sample in self.running():
                if (owner, sample) in self.texts[rank]:
                    self.finish(rank, owner, sample)
            while self.wire.messages:
                self.deliver_at(0)
            self.wait(RESEND_S)
        for rank in self.alive():
            assert set(self.ended[rank]) == {f"s{n}" for n in range(SAMPLES_PER_RANK)}, "lost"
            assert self.handover(rank).away == {}


def check_schedules(number):
    options = settings(
        max_examples=number,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # the mutants below would be shrunk for a minute
        report_multiple_bugs=False,
    )
    run_state_machine_as_test(RandomSchedules, settings=options)


def test_every_sample_ends_exactly_once():
    check_schedules(300)


@pytest.mark.slow
def test_every_sample_ends_exactly_once_in_ten_thousand_schedules():
    check_schedules(10_000)


def test_the_schedules_would_find_a_lost_sample(monkeypatch):
    monkeypatch.setattr(Handover, "tick", lambda self, now_s: [])  # nothing is sent again, nobody is given up
    with pytest.raises(AssertionError, match="lost"):
        check_schedules(300)


def test_the_schedules_would_find_a_sample_that_ends_twice(monkeypatch):
    def welcome(self, message):
        is_finished = message.kind is Kind.FINISHED
        self._away.pop(message.sample, None)
        return [CameBack(message.sample, message.body, is_finished, message.sender)]

    monkeypatch.setattr(Handover, "_welcome", welcome)
    with pytest.raises(AssertionError):
        check_schedules(300)
