import pytest
import torch

from tlt_trl.drafter import most_frequent_token_ids


def test_most_frequent_sorted_by_id():
    counts = torch.tensor([0, 5, 1, 9, 9, 2])
    assert most_frequent_token_ids(counts, 3).tolist() == [1, 3, 4]


def test_ties_go_to_the_smaller_id():
    assert most_frequent_token_ids(torch.ones(100), 4).tolist() == [0, 1, 2, 3]


def test_always_kept():
    counts = torch.tensor([9, 9, 9, 0, 0])
    assert most_frequent_token_ids(counts, 3, always=[4, 4]).tolist() == [0, 1, 4]
    assert counts.tolist() == [9, 9, 9, 0, 0]


@pytest.mark.parametrize(("size", "always"), [(6, ()), (0, ()), (1, (0, 1)), (2, (7,))])
def test_bad_sizes(size, always):
    with pytest.raises(ValueError):
        most_frequent_token_ids(torch.ones(5), size, always)
