import pytest
import torch
from tests.tolerance import assert_close, tolerance

from tlt_trl.drafter import losses
from tlt_trl.drafter.losses import (
    Teacher,
    acceptance,
    reference_soft_cross_entropy,
    simulated_acceptance_length,
    soft_cross_entropy,
)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_fast_equals_reference(temperature, chunk_rows, monkeypatch):
    monkeypatch.setattr(losses, "CPU_CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(losses, "MIN_CHUNK_ROWS", chunk_rows)
    torch.manual_seed(0)
    hidden, head = torch.randn(40, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    teacher = Teacher(torch.randn(12, 16), torch.randn(30, 16), temperature)
    positions, weights = torch.randint(0, 12, (40,)), torch.rand(40)
    # Logits (16 products), the sum over the vocabulary (30) and, for the loss, over the rows (40); and back again.
    operations = 2 * (16 + 30 + 40)
    fast = soft_cross_entropy(hidden, head, teacher, positions, weights)
    reference = reference_soft_cross_entropy(hidden, head, teacher, positions, weights)
    for fast_value, reference_value in zip(fast, reference, strict=True):
        assert_close(fast_value, reference_value, operations)
    fast_grads = torch.autograd.grad(2 * fast[0], (hidden, head))
    reference_grads = torch.autograd.grad(2 * reference[0], (hidden, head))
    for fast_grad, reference_grad in zip(fast_grads, reference_grads, strict=True):
        assert_close(fast_grad, reference_grad, operations)


def test_a_head_that_is_not_trained_changes_no_other_gradient():
    torch.manual_seed(0)
    hidden, head = torch.randn(9, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    teacher, positions = Teacher(torch.randn(9, 16), torch.randn(30, 16)), torch.arange(9)
    trained = soft_cross_entropy(hidden, head, teacher, positions, torch.ones(9))[0]
    frozen = soft_cross_entropy(hidden, head.detach(), teacher, positions, torch.ones(9))[0]
    (expected, _), (grad,) = (torch.autograd.grad(trained, (hidden, head)), torch.autograd.grad(frozen, (hidden,)))
    assert torch.equal(trained, frozen) and torch.equal(grad, expected)


def test_gradient_vanishes_at_the_teacher():
    torch.manual_seed(0)
    teacher = Teacher(torch.randn(5, 8), torch.randn(11, 8))
    hidden = teacher.hidden.clone().requires_grad_()
    loss, row_losses, accepted = soft_cross_entropy(hidden, teacher.head, teacher, torch.arange(5), torch.ones(5))
    loss.backward()
    # Two distributions over 11 tokens, whose difference the head multiplies, cancel.
    operations = 8 + 11
    limit = tolerance(torch.float32, operations, scale=teacher.head.abs().max().item())
    assert hidden.grad.abs().max() < limit
    probs = teacher.probs(torch.arange(5))
    assert_close(row_losses, -(probs * probs.log()).sum(-1), operations)
    assert_close(accepted, probs.max(dim=-1).values, operations)


def test_acceptance_of_greedy_and_sampled_drafts():
    # policy over 4 tokens, drafter over tokens 1 and 3
    p = torch.tensor([[0.1, 0.5, 0.2, 0.2]])
    q = torch.tensor([[0.8, 0.2]])
    greedy, sampled = acceptance(p, q.log(), torch.tensor([1, 3]), temperature=1.0)
    assert greedy.item() == pytest.approx(0.5)  # p(argmax q)
    assert sampled.item() == pytest.approx(0.5 + 0.2)  # sum of min(p, q) = 1 - TV(p, q)


def test_simulated_acceptance_length():
    assert simulated_acceptance_length(torch.tensor([[1.0, 1.0], [1.0, 1.0]])) == 3.0
    assert simulated_acceptance_length(torch.tensor([[0.5, 0.5], [0.0, 1.0]])) == pytest.approx(1 + 0.25 + 0.125)
    assert simulated_acceptance_length(torch.empty(0, 3)) == 1.0
