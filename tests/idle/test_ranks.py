"""Several real processes over gloo, without an engine: merging, ranks with nothing to do, ranks that die."""

import functools
from pathlib import Path

import pytest
import torch
from tests import rank_tools


pytestmark = pytest.mark.processes

run_ranks = functools.partial(rank_tools.run_ranks, Path(__file__).with_name("rank_script.py"))


def drafters(folder, world_size):
    return [torch.load(folder / f"drafter_{rank}.pt") for rank in range(world_size)]


def test_ranks_train_while_they_wait_and_end_with_the_same_drafter(tmp_path):
    results, codes = run_ranks(tmp_path, 2, rollout_s=[[0.0, 1.0], [0.8, 0.0], [0.0, 0.5]])
    assert codes == [0, 0], results
    first, second = (result["reports"] for result in results)
    # In every round the rank that waits trains and the other one does not.
    assert [report["steps"] > 0 for report in first] == [True, False, True]
    assert [report["steps"] > 0 for report in second] == [False, True, False]
    for one, other in zip(first, second, strict=True):
        assert one["all_tokens"] == other["all_tokens"] == one["tokens"] + other["tokens"] > 0
    one, other = drafters(tmp_path, 2)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_ranks_without_prompts_or_samples_do_not_hang(tmp_path):
    # Rank 1 has nothing to generate and nothing to train on, rank 2 is the last one.
    results, codes = run_ranks(tmp_path, 3, rollout_s=[[0.3, 0.0, 0.6]] * 2, samples=[8, 0, 8])
    assert codes == [0, 0, 0], results
    reports = results[1]["reports"]
    assert all(report["steps"] == 0 and report["idle_s"] > 0.2 for report in reports)
    assert all(report["all_tokens"] > 0 for report in reports)


def test_all_ranks_of_an_engine_train_while_they_wait_for_another_one(tmp_path):
    results, codes = run_ranks(tmp_path, 4, group_size=2, rollout_s=[[0.0, 0.0, 1.0, 1.0]])
    assert codes == [0] * 4, results
    assert [result["reports"][0]["steps"] > 0 for result in results] == [True, True, False, False]
    first, *others = drafters(tmp_path, 4)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_nobody_with_samples_merges_nothing(tmp_path):
    results, codes = run_ranks(tmp_path, 2, rollout_s=[[0.0, 0.2]], samples=[0, 0])
    assert codes == [0, 0], results
    assert [result["reports"][0]["all_tokens"] for result in results] == [0.0, 0.0]


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_within_the_deadline(tmp_path, victim):
    first, second = [[0.1] * 3, [0.1] * 3]
    second[victim] = None
    results, codes = run_ranks(tmp_path, 3, rollout_s=[first, second], timeout_s=4.0)
    assert codes[victim] == -9
    for rank in {0, 1, 2} - {victim}:
        assert codes[rank] == 3, results[rank]
        message = results[rank]["error"]
        if victim == 0:  # hosts the store of a group that is started without a launcher
            assert "process that hosts it has died" in message and "rank 0" in message
        else:
            assert f"waited 4 s for the rollouts of ranks [{victim}]" in message
