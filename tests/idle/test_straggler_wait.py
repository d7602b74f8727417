import bisect
import random
import threading
import time

import pytest
from torch.distributed import HashStore, Store, TCPStore

from tlt_trl.idle.straggler_wait import StragglerError, StragglerWait


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True)


def ranks(store, world_size, timeout_s=20.0):
    return [StragglerWait(store.clone(), rank, world_size, timeout_s) for rank in range(world_size)]


def test_nobody_is_released_before_the_last_one(store):
    first, second, last = ranks(store, 3)
    first.announce()
    second.announce()
    assert not first.all_finished() and not second.all_finished()
    last.announce()
    for wait in (first, second, last):
        wait.join()
        assert wait.all_finished()


def test_the_end_is_noted_when_it_is_seen(store):
    early, late = ranks(store, 2)
    early.announce()
    announced_s = time.perf_counter()
    late.announce()
    early.join()
    assert announced_s <= late.finished_at_s <= time.perf_counter()
    assert announced_s <= early.finished_at_s <= time.perf_counter()


def test_rounds_do_not_mix(store):
    first, second = ranks(store, 2)
    for _ in range(5):
        first.announce()
        assert not first.all_finished()
        second.announce()
        first.join()
        second.join()


def test_missing_ranks_are_named_after_the_deadline(store):
    waits = ranks(store, 4, timeout_s=0.3)
    waits[0].announce()
    waits[2].announce()
    with pytest.raises(StragglerError, match=r"Rank 0 waited 0 s .* ranks \[1, 3\]"):
        waits[0].join()


def test_all_ranks_end_when_the_first_deadline_passes(store):
    # The second one, which came later and has more patience, learns it from the first.
    first, second = StragglerWait(store.clone(), 1, 4, 0.5), StragglerWait(store.clone(), 2, 4, 60.0)
    first.announce()
    second.announce()
    for wait in (second, first):
        with pytest.raises(StragglerError, match=r"Rank 1 waited 0 s .* ranks \[0, 3\]"):
            wait.join()


def test_a_single_rank_never_waits(store):
    (wait,) = ranks(store, 1)
    wait.announce()
    assert wait.all_finished()


def test_a_tensor_parallel_group_acts_as_one(store):
    waits = [StragglerWait(store.clone(), rank, 4, 20.0, group_size=2) for rank in range(4)]
    for wait in (waits[1], waits[3], waits[0]):
        wait.announce()
    assert not any(wait.all_finished() for wait in (waits[0], waits[1], waits[3]))
    waits[2].announce()  # the leader of the second group
    for wait in waits:
        wait.join()


def test_a_missing_group_is_named_with_all_its_ranks(store):
    wait = StragglerWait(store.clone(), 1, 4, 0.3, group_size=2)
    wait.announce()
    with pytest.raises(StragglerError, match=r"ranks \[0, 1, 2, 3\]"):
        wait.join()
    with pytest.raises(ValueError, match="multiple of group_size=3"):
        StragglerWait(store.clone(), 0, 4, group_size=3)


class CountedStore(Store):
    """Counts the requests; nobody is waited for, since a blocked thread per rank would test the machine."""

    def __init__(self):
        super().__init__()
        self.store = HashStore()
        self.requests = 0
        self.lock = threading.Lock()

    def clone(self):
        return self

    def count(self, method, *args):
        with self.lock:
            self.requests += 1
        return method(*args)

    def set(self, key, value):
        self.count(self.store.set, key, value)

    def get(self, key):
        return self.count(lambda: b"")

    def add(self, key, value):
        return self.count(self.store.add, key, value)

    def wait(self, keys, timeout):
        self.count(lambda: None)

    def deleteKey(self, key):  # noqa: N802 - as torch calls it
        return self.count(self.store.delete_key, key)


def test_requests_do_not_grow_with_the_number_of_ranks():
    """1 024 ranks: each asks a constant number of times a round, and old rounds leave no keys behind."""
    world_size, rounds = 1024, 3
    store = CountedStore()
    waits = [StragglerWait(store, rank, world_size, timeout_s=30.0) for rank in range(world_size)]
    for _ in range(rounds):
        for wait in waits:
            wait.announce()
        for wait in waits:
            wait.join()
    per_rank_and_round = store.requests / (world_size * rounds)
    assert per_rank_and_round <= 5
    # 1 024 ranks whose rollouts end log-normally around a minute (sigma 0.5): requests are made when a rank ends.
    # Polling ten times a second would ask 10 240 times a second, all the time.
    rng = random.Random(0)
    ends_s = sorted(rng.lognormvariate(4.0, 0.5) for _ in range(world_size))
    busiest_second = max(bisect.bisect_left(ends_s, end + 1.0) - i for i, end in enumerate(ends_s))
    assert busiest_second * per_rank_and_round < 200
    assert world_size * per_rank_and_round / ends_s[-1] < 25
    # The last two rounds keep one key per rank, a counter and the signal.
    assert store.store.num_keys() <= 2 * (world_size + 2)
