import pytest
import torch

from tlt_trl.idle.averaging import average_by_tokens


def run_ranks(tensors_by_rank, tokens_by_rank):
    """
    Runs `average_by_tokens` on all ranks in one process.

    The k-th collective of a rank sums what all ranks pass to their k-th; ranks before the last run twice, first to
    learn what they contribute.
    """
    contributions = []
    for tensors, tokens in zip(tensors_by_rank, tokens_by_rank, strict=True):
        seen = []

        def record(tensor, seen=seen, tokens=tokens):
            seen.append(tensor.clone())
            if len(seen) == 1:
                tensor.fill_(sum(tokens_by_rank))  # the total is known to this test

        average_by_tokens([t.clone() for t in tensors], tokens, record)
        contributions.append(seen)
    totals = [sum(parts) for parts in zip(*contributions, strict=True)]
    results = []
    for tensors, tokens in zip(tensors_by_rank, tokens_by_rank, strict=True):
        calls = iter(totals)
        results.append(average_by_tokens(tensors, tokens, lambda tensor, calls=calls: tensor.copy_(next(calls))))
    return results


def test_weighted_by_tokens():
    ranks = [[torch.tensor([1.0, 2.0]), torch.tensor(3.0)], [torch.tensor([5.0, 6.0]), torch.tensor(7.0)]]
    assert run_ranks(ranks, [100.0, 300.0]) == [400.0, 400.0]
    for rank in ranks:
        assert rank[0].tolist() == [4.0, 5.0]
        assert rank[1].item() == 6.0


def test_a_rank_that_trained_nothing_counts_nothing():
    ranks = [[torch.tensor([1.0])], [torch.tensor([9.0])]]
    run_ranks(ranks, [50.0, 0.0])
    assert [rank[0].item() for rank in ranks] == [1.0, 1.0]


def test_nothing_is_sent_when_nobody_trained():
    sent = []
    tensor = torch.tensor([1.0])
    assert average_by_tokens([tensor], 0.0, sent.append) == 0.0
    assert len(sent) == 1 and tensor.item() == 1.0


def test_equals_start_plus_average_of_the_changes():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(10, generator=generator)
    changes = [torch.randn(10, generator=generator) for _ in range(3)]
    tokens = [10.0, 0.0, 30.0]
    ranks = [[start + change] for change in changes]
    run_ranks(ranks, tokens)
    expected = start + sum(t * change for t, change in zip(tokens, changes, strict=True)) / sum(tokens)
    for (tensor,) in ranks:
        torch.testing.assert_close(tensor, expected)


def test_shapes_and_dtypes_are_kept():
    ranks = [[torch.ones(2, 3, dtype=torch.bfloat16)], [torch.zeros(2, 3, dtype=torch.bfloat16)]]
    run_ranks(ranks, [1.0, 1.0])
    assert ranks[0][0].dtype == torch.bfloat16 and ranks[0][0].tolist() == [[0.5] * 3] * 2


@pytest.mark.parametrize("tokens", [[1.0, 1.0], [3.0, 1.0]])
def test_all_ranks_end_with_the_same_bits(tokens):
    generator = torch.Generator().manual_seed(1)
    ranks = [[torch.randn(1000, generator=generator)] for _ in tokens]
    run_ranks(ranks, tokens)
    assert torch.equal(ranks[0][0], ranks[1][0])
