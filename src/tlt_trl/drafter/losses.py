"""
Soft cross-entropy of the drafter against the policy, and how many of its tokens the policy would accept.

Most of the work is the head (rows x vocabulary), so the fast version never stores all logits. It goes through the
rows in chunks, computes the policy's distribution at a position once for all draft steps that predict it, and computes
the gradients in the same pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


# Rows x vocabulary per chunk. 4 MiB in fp32 fit into a CPU's cache and are large enough for its matrix kernels. On an
# accelerator, every chunk adds to the whole gradient of the head, so chunks are as large as memory allows (a few
# buffers of 128 MiB; not measured on a GPU).
CPU_CHUNK_ELEMENTS, CHUNK_ELEMENTS = 1 << 20, 1 << 25
MIN_CHUNK_ROWS = 64


@dataclass
class Teacher:
    """
    The policy's next-token distribution on the draft vocabulary.

    Args:
        hidden (`torch.Tensor` of shape (N, H)):
            Policy states after the final norm.
        head (`torch.Tensor` of shape (draft_vocab_size, H)):
            Rows of the policy's `lm_head`, in the dtype to multiply in.
        temperature (`float`):
            Sampling temperature of the rollouts. The drafter's logits are divided by it as well.
    """

    hidden: Tensor
    head: Tensor
    temperature: float = 1.0

    def probs(self, positions: Tensor) -> Tensor:
        """Distribution after the tokens at `positions`, fp32, of shape (len(positions), draft_vocab_size)."""
        logits = self.hidden[positions].to(self.head.dtype) @ self.head.T
        return torch.softmax(logits / self.temperature, dim=-1, dtype=torch.float32)


def soft_cross_entropy(
    hidden: Tensor, head: Tensor, teacher: Teacher, positions: Tensor, row_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Args:
        hidden (`torch.Tensor` of shape (R, H)):
            Drafter states after its final norm.
        head (`torch.Tensor` of shape (draft_vocab_size, H)):
            The drafter's head; one that is not trained costs no gradient.
        teacher ([`Teacher`]):
            The policy.
        positions (`torch.Tensor` of shape (R,)):
            Position whose next-token distribution is the label of each row. Several rows may share one.
        row_weights (`torch.Tensor` of shape (R,)):
            Weight of each row in the loss.

    Returns:
        The weighted sum, a scalar with gradients; and two tensors of shape (R,) without gradients: the cross-entropy
        of every row, and the policy's probability of the drafter's most likely token.
    """
    return _SoftCrossEntropy.apply(hidden, head, teacher, positions, row_weights)


def reference_soft_cross_entropy(
    hidden: Tensor, head: Tensor, teacher: Teacher, positions: Tensor, row_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in four lines, for tests."""
    probs = teacher.probs(positions)
    log_q = torch.log_softmax(hidden @ head.T / teacher.temperature, dim=-1)
    losses = -(probs * log_q).sum(-1)
    accepted = probs.gather(1, log_q.argmax(-1, keepdim=True))[:, 0]
    return (losses * row_weights).sum(), losses.detach(), accepted


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, teacher, positions, row_weights):
        dtype = teacher.head.dtype
        states, weight = hidden.to(dtype), head.to(dtype)
        losses = torch.empty(len(positions), device=hidden.device)
        accepted = torch.empty_like(losses)
        trains_head = ctx.needs_input_grad[1]
        needs_grad = ctx.needs_input_grad[0] or trains_head
        grad_hidden = torch.empty_like(states) if needs_grad else None
        grad_head = torch.zeros_like(head) if trains_head else None
        # Puts rows with the same label next to each other, so that its distribution is computed once.
        order = positions.argsort(stable=True)
        chunk_elements = CPU_CHUNK_ELEMENTS if head.device.type == "cpu" else CHUNK_ELEMENTS
        for rows in order.split(max(MIN_CHUNK_ROWS, chunk_elements // head.shape[0])):
            unique, inverse = positions[rows].unique_consecutive(return_inverse=True)
            probs = teacher.probs(unique)[inverse]  # shape: [rows, draft_vocab_size]
            chunk = states[rows]
            logits = (chunk @ weight.T).float()
            if teacher.temperature != 1.0:
                logits /= teacher.temperature
            best, best_ids = logits.max(dim=-1, keepdim=True)
            expected_logit = torch.linalg.vecdot(probs, logits)
            accepted[rows] = probs.gather(1, best_ids)[:, 0]
            q = torch.softmax(logits, dim=-1)
            # Log-sum-exp from the best token, whose probability is never tiny. This saves a second exp of all logits.
            losses[rows] = (best - q.gather(1, best_ids).log())[:, 0] - expected_logit
            if needs_grad:
                grad_logits = q.sub_(probs).mul_(row_weights[rows, None] / teacher.temperature).to(dtype)
                grad_hidden[rows] = grad_logits @ weight
                if trains_head:
                    grad_head += grad_logits.T @ chunk
        if needs_grad:
            ctx.save_for_backward(grad_hidden.to(hidden.dtype), grad_head)
        ctx.mark_non_differentiable(losses, accepted)
        return (losses * row_weights).sum(), losses, accepted

    @staticmethod
    def backward(ctx, grad_loss, _, __):
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_loss, None if grad_head is None else grad_head * grad_loss, None, None, None


def acceptance(p: Tensor, draft_logits: Tensor, draft_token_ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """
    Expected acceptance of one draft token under the two ways to sample it.

    Args:
        p (`torch.Tensor` of shape (R, vocab_size)):
            The policy's distribution over its whole vocabulary.
        draft_logits (`torch.Tensor` of shape (R, draft_vocab_size)):
            Logits of the drafter.
        draft_token_ids (`torch.Tensor` of shape (draft_vocab_size,)):
            Policy ids of the draft tokens.
        temperature (`float`):
            Sampling temperature.

    Returns:
        Two tensors of shape (R,): for a greedy drafter p(argmax q), for a sampling drafter 1 - TV(p, q).
    """
    p_drafted = p[:, draft_token_ids]  # shape: [R, draft_vocab_size]
    q = torch.softmax(draft_logits.float() / temperature, dim=-1)
    greedy = p_drafted.gather(1, q.argmax(-1, keepdim=True))[:, 0]
    return greedy, torch.minimum(p_drafted, q).sum(-1)


def simulated_acceptance_length(accepted: Tensor) -> float:
    """
    Tokens per verification, including the policy's own token, if every row drafted in all steps.

    Args:
        accepted (`torch.Tensor` of shape (R, num_steps)):
            Expected acceptance of row r in draft step j. A draft token counts only when all before it are accepted.
    """
    if accepted.shape[0] == 0:
        return 1.0
    return 1.0 + accepted.cumprod(dim=1).mean(dim=0).sum().item()
