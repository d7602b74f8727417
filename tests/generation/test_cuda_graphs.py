import pytest

from tlt_trl.generation.cuda_graphs import CudaGraphPlan, batch_sizes, plan_cuda_graphs


def test_batch_sizes():
    assert batch_sizes(3) == [1, 2, 3]
    assert batch_sizes(20) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20]
    assert batch_sizes(33)[-9:] == [18, 20, 22, 24, 26, 28, 30, 32, 33]


def test_without_padding_every_size_is_there():
    plan = plan_cuda_graphs([1, 3], max_batch_size=4, max_padding=0.0)
    assert plan.sizes == (1, 2, 3, 4, 6, 8, 12, 16)
    assert plan.token_slots == 52
    assert plan.separate_token_slots == (1 + 2 + 3 + 4) * (1 + 2 + 4)


@pytest.mark.parametrize("max_batch_size", [1, 4, 8, 37, 256])
@pytest.mark.parametrize("choices", [[], [3], [1, 2, 3, 5]])
def test_no_step_is_padded_by_more_than_was_allowed(choices, max_batch_size):
    plan = plan_cuda_graphs(choices, max_batch_size)
    assert list(plan.sizes) == sorted(set(plan.sizes))
    for length in {1, *(k + 1 for k in choices)}:
        for batch in batch_sizes(max_batch_size):
            if batch * length > 512:
                continue
            captured = min(size for size in plan.sizes if size >= batch * length)
            assert (captured - batch * length) / captured <= 0.125


def test_strategies_share_sizes():
    plan = plan_cuda_graphs([1, 2, 3, 5], max_batch_size=32)
    assert (plan.separate_token_slots, plan.token_slots) == (5376, 1160)
    assert plan.sizes[-1] == 32 * 6


def test_the_line():
    plan = CudaGraphPlan((1, 2, 5), 8, 20)
    assert plan.max_bytes(num_layers=10, hidden_size=1024, bytes_per_value=2) == 8 * 10 * 6 * 1024 * 2
    assert plan.describe(10, 1024, 2) == (
        "CUDA graphs of 3 sizes up to 5 tokens, at most 1 MiB by estimate; captured apart for every strategy they "
        "would take 2.5 times as much."
    )


def test_padding_is_a_share():
    with pytest.raises(ValueError, match="max_padding"):
        plan_cuda_graphs([1], 4, max_padding=1.0)
