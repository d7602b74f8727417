"""Before anything is trained in a run, ranks compare their drafters."""

import pytest
import torch

from tlt_trl.drafter.ranks import DraftersDifferError


class Wait:
    """Of a run with several processes; nothing here gets as far as waiting."""


@pytest.fixture
def gathers():
    """What was gathered; the second rank has one bit less in each entry where `differs` is set."""
    return []


def gather_with(gathers, differs):
    def gather(own):
        gathers.append(own)
        return torch.cat([own, own - 1 if differs else own])

    return gather


def test_ranks_that_differ_end_before_they_train(make_online, gathers):
    online = make_online(gather=gather_with(gathers, differs=True), wait=Wait())
    online.start_run()
    with pytest.raises(DraftersDifferError, match=r"ranks \[1\]"):
        online.start_rollout(0)


def test_they_are_compared_once_in_a_run(make_online, gathers):
    online = make_online(gather=gather_with(gathers, differs=False), wait=Wait())
    for _ in range(2):
        online.start_run()
        online.start_rollout(0)
        online.start_rollout(1)
    assert len(gathers) == 2


def test_one_process_compares_nothing(make_online, gathers):
    online = make_online(gather=gather_with(gathers, differs=True))
    online.start_run()
    online.start_rollout(0)
    assert not gathers
