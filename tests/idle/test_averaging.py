import pytest
import torch
from tests.tolerance import assert_close

from tlt_trl.drafter import DrafterTrainer, DrafterTrainingArguments, FeatureBuffer
from tlt_trl.idle import averaging
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


def test_large_tensors_go_in_parts(monkeypatch):
    monkeypatch.setattr(averaging, "BUCKET_ELEMENTS", 4)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2,), (3, 3), (1,), (2,), (5,)]
    ranks = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2)]
    expected = [(first + 3 * second) / 4 for first, second in zip(*ranks, strict=True)]
    sent = []
    average_by_tokens([t.clone() for t in ranks[0]], 1.0, lambda tensor: sent.append(len(tensor)))
    assert sent == [1, 2, 4, 4, 4, 4, 1]  # the number of tokens first
    run_ranks(ranks, [1.0, 3.0])
    for rank in ranks:
        for tensor, average in zip(rank, expected, strict=True):
            torch.testing.assert_close(tensor, average)


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


class TestAgainstOneProcess:
    """Two ranks with half of the samples each against one process with all of them."""

    @pytest.fixture
    def make_trainer(self, policy, make_drafter):
        def make(samples, **arguments):
            buffer = FeatureBuffer(max_tokens=100_000)
            for sample in samples:
                buffer.add(sample)
            arguments = {"unroll_steps": 3, "autocast_dtype": torch.float32} | arguments
            trainer = DrafterTrainer(make_drafter(), buffer, DrafterTrainingArguments(**arguments))
            trainer.set_policy(policy.get_input_embeddings().weight, policy.get_output_embeddings().weight)
            return trainer

        return make

    def test_a_gradient_step_on_each_half_is_one_on_the_union(self, make_trainer, fill_buffer):
        # Plain gradient descent without clipping is linear in the data, so the two agree up to rounding.
        samples = fill_buffer(num_rows=8).samples
        trainers = [
            make_trainer(part, max_grad_norm=1e9, warmup_steps=1, learning_rate=0.05)
            for part in (samples, samples[:4], samples[4:])
        ]
        for trainer in trainers:
            trainer.optimizer = torch.optim.SGD(trainer.drafter.parameters(), lr=0.05)
        start = [parameter.detach().clone() for parameter in trainers[0].drafter.parameters()]
        tokens = [trainer.step().tokens for trainer in trainers]
        assert tokens[0] == tokens[1] + tokens[2] and tokens[1] > 0
        union, *ranks = [list(trainer.drafter.parameters()) for trainer in trainers]
        run_ranks([[p.data for p in rank] for rank in ranks], tokens[1:])
        # Moves are a hundredth of the weights, so only the weights' own rounding shows: an update, two weighted terms
        # of the average and their sum.
        for expected, merged in zip(union, ranks[0], strict=True):
            assert_close(merged, expected, num_operations=4)
        assert any(not torch.equal(before, after) for before, after in zip(start, union, strict=True))

    def test_learns_as_much_from_as_many_tokens(self, make_trainer, fill_buffer):
        samples = fill_buffer(num_rows=16).samples
        union, *ranks = [
            make_trainer(part, learning_rate=3e-3, max_tokens_per_step=100, seed=seed)
            for seed, part in enumerate((samples, samples[:8], samples[8:]))
        ]
        before = union.evaluate(samples)["loss"]
        for _ in range(5):  # rollouts
            reports = [rank.train_for(60.0, stop=lambda r=rank, s=rank.steps: r.steps >= s + 12) for rank in ranks]
            run_ranks(
                [[p.data for p in rank.drafter.parameters()] for rank in ranks], [report.tokens for report in reports]
            )
        while union.tokens_trained < sum(rank.tokens_trained for rank in ranks):
            union.step()
        together, apart = union.evaluate(samples)["loss"], ranks[0].evaluate(samples)["loss"]
        assert together < 0.7 * before
        # Averaging is not the same as twice the steps, but most of the gain must be there.
        assert before - apart > 0.7 * (before - together)
        assert ranks[0].evaluate(samples) == ranks[1].evaluate(samples)
