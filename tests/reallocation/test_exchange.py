"""Mailboxes and rounds over a real store, with a thread for every rank."""

import time

import numpy as np
import pytest
from torch.distributed import TCPStore

from tlt_trl.idle.exchange import Mailbox, Rounds
from tlt_trl.idle.handover import Kind, Message
from tlt_trl.idle.reallocation import NUM_POINTS, RankState, StepTime, horizons


POINTS = horizons(1000)
ALWAYS = np.ones(NUM_POINTS)
TIME = StepTime(0.010, 2.0, 0.002)


def row(running):
    return RankState(running * ALWAYS, ALWAYS, running, 100, TIME).row()


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True)


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class TestMailbox:
    @pytest.fixture
    def boxes(self, store):
        boxes = [Mailbox(store.clone(), rank) for rank in range(2)]
        yield boxes
        for box in boxes:
            box.stop()

    def test_messages_arrive_in_their_order(self, boxes):
        boxes[1].start()
        sent = [Message(Kind.SEND, 0, 1, sample=str(n), body={"ids": list(range(n))}) for n in range(5)]
        for message in sent:
            boxes[0].send(message)
        got = []
        until(lambda: got.extend(boxes[1].take()) or len(got) == 5)
        assert got == sent and boxes[1].take() == []
        assert boxes[0].bytes_sent > 0

    def test_what_comes_between_two_rollouts_is_kept(self, boxes):
        boxes[1].start()
        boxes[1].stop()
        message = Message(Kind.FINISHED, 0, 1, sample="late")
        boxes[0].send(message)
        boxes[1].start()
        assert boxes[1].has_mail.wait(20.0)
        assert boxes[1].take() == [message]


class TestRounds:
    @pytest.fixture
    def ranks(self, store):
        ranks = [Rounds(store.clone(), rank, 3, POINTS, interval_s=0.02) for rank in range(3)]
        yield ranks
        for rank in ranks:
            rank.stop()

    def complete(self, ranks, rows):
        """One round; a rank without a row has left one."""
        completed = [rank.completed for rank in ranks]
        for rank, own in zip(ranks, rows, strict=True):
            if own is not None:
                until(lambda rank=rank: rank.is_due)
                rank.describe(own)
        until(lambda: all(rank.completed > before for rank, before in zip(ranks, completed, strict=True)))

    def test_every_donor_hears_of_its_moves(self, ranks):
        for rank in ranks:
            rank.start()
        self.complete(ranks, [row(0), row(8), row(0)])
        moves = [rank.take_moves() for rank in ranks]
        assert [(m.receiver, m.samples) for m in moves[1]] == [(0, 3), (2, 2)]
        assert moves[0] == moves[2] == [] == ranks[1].take_moves()

    def test_no_round_ends_without_all_ranks(self, ranks):
        for rank in ranks:
            rank.start()
        until(lambda: all(rank.is_due for rank in ranks))
        ranks[0].describe(row(8))
        ranks[1].describe(row(0))
        time.sleep(0.1)
        assert [rank.completed for rank in ranks] == [0, 0, 0]
        ranks[2].describe(row(0))
        until(lambda: all(rank.completed == 1 for rank in ranks))

    def test_a_rank_that_has_left_is_described_by_its_last_row(self, ranks):
        for rank in ranks:
            rank.start()
        ranks[2].leave(row(0))
        for _ in range(4):
            self.complete(ranks, [row(8), row(8), None])
        assert not ranks[2].is_due
        ranks[2].resume()
        self.complete(ranks, [row(8), row(8), row(8)])

    def test_a_rollout_that_ends_ends_the_rounds_of_all(self, ranks):
        for _ in range(4):
            for rank in ranks:
                rank.start()
            self.complete(ranks, [row(1)] * 3)
            until(lambda: all(rank.is_due for rank in ranks))
            ranks[0].describe(row(1))  # the others never do
            for rank in ranks:
                rank.stop()

    def test_old_rounds_leave_no_keys(self, store, ranks):
        counts = []
        for _ in range(6):
            for rank in ranks:
                rank.start()
            for _ in range(5):
                self.complete(ranks, [row(1)] * 3)
            for rank in ranks:
                rank.stop()
            counts.append(store.num_keys())
        assert counts[-1] == counts[2]
