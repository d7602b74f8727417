"""How good a drafter is: expected acceptance over the policy's whole vocabulary."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .feature_buffer import FeatureSample
from .losses import Teacher, acceptance, reference_soft_cross_entropy, simulated_acceptance_length
from .modeling_drafter import Drafter
from .packing import PackedBatch, pack
from .unroll import unroll


# Rows whose distribution over the whole vocabulary is held at once (50 MB for 49k tokens).
CHUNK_ROWS = 256


@torch.no_grad()
def evaluate_drafter(
    drafter: Drafter,
    samples: Sequence[FeatureSample],
    embed_tokens: Tensor,
    lm_head: Tensor,
    *,
    num_steps: int,
    temperature: float,
    max_tokens: int,
) -> dict[str, float]:
    """
    Args:
        drafter ([`Drafter`]):
            The drafter.
        samples (`Sequence[FeatureSample]`):
            Samples that the drafter was not trained on.
        embed_tokens, lm_head (`torch.Tensor` of shape (vocab_size, H)):
            The policy's embedding and head.
        num_steps (`int`):
            Draft steps.
        temperature (`float`):
            Sampling temperature.
        max_tokens (`int`):
            Largest number of tokens packed together.

    Returns:
        `dict[str, float]`: `loss`; for each draft step i `acceptance_i` (greedy drafter: the policy's probability of
        the drafter's best token) and `sampled_acceptance_i` (sampling drafter: 1 - TV); `acceptance_length` and
        `sampled_acceptance_length`, tokens per verification. Empty when no sample has an answer long enough.
    """
    results = [
        _evaluate_batch(drafter, batch.to(drafter.device), embed_tokens, lm_head, num_steps, temperature)
        for batch in _batches(samples, max_tokens)
    ]
    metrics: dict[str, float] = {}
    for step in range(num_steps):
        rows = torch.cat([result[step] for result in results]) if results else torch.empty(0, 3)
        if len(rows) == 0:
            return metrics
        loss, greedy, sampled = rows.mean(dim=0).tolist()
        metrics[f"loss_{step + 1}"] = loss
        metrics[f"acceptance_{step + 1}"] = greedy
        metrics[f"sampled_acceptance_{step + 1}"] = sampled
    chains = torch.cat([result[num_steps] for result in results])  # shape: [R, num_steps, 3]
    metrics["loss"] = sum(metrics[f"loss_{step + 1}"] for step in range(num_steps)) / num_steps
    metrics["acceptance_length"] = simulated_acceptance_length(chains[:, :, 1])
    metrics["sampled_acceptance_length"] = simulated_acceptance_length(chains[:, :, 2])
    return metrics


def _batches(samples: Sequence[FeatureSample], max_tokens: int) -> Iterator[PackedBatch]:
    group: list[FeatureSample] = []
    for sample in samples:
        if group and sum(s.num_tokens for s in group) + sample.num_tokens > max_tokens:
            yield pack(group)
            group = []
        group.append(sample)
    if group:
        yield pack(group)


def _evaluate_batch(
    drafter: Drafter, batch: PackedBatch, embed_tokens: Tensor, lm_head: Tensor, num_steps: int, temperature: float
) -> list[Tensor]:
    """Per step (rows, 3): loss, greedy and sampled acceptance; then, for rows that have all steps, (R, steps, 3)."""
    rows = [batch.rows(step) for step in range(num_steps)]
    results = []
    for step, hidden in enumerate(unroll(drafter, batch, embed_tokens, num_steps)):
        states, positions = drafter.norm(hidden), rows[step] + 1 + step
        chunks = zip(states.split(CHUNK_ROWS), positions.split(CHUNK_ROWS), strict=True)
        scored = [
            _score_rows(drafter, chunk, at, batch.last_hidden_state, lm_head, temperature) for chunk, at in chunks
        ]
        results.append(torch.cat(scored))
    chains = [result[torch.searchsorted(r, rows[-1])] for r, result in zip(rows, results, strict=True)]
    return [*results, torch.stack(chains, dim=1)]


def _score_rows(
    drafter: Drafter, states: Tensor, positions: Tensor, policy_states: Tensor, lm_head: Tensor, temperature: float
) -> Tensor:
    """(rows, 3): loss on the draft vocabulary, greedy and sampled acceptance on the whole one."""
    draft_head = lm_head[drafter.draft_token_ids]
    weights = torch.ones(len(positions), device=states.device)
    teacher = Teacher(policy_states, draft_head, temperature)
    _, losses, _ = reference_soft_cross_entropy(states, drafter.lm_head.weight, teacher, positions, weights)
    p = Teacher(policy_states, lm_head, temperature).probs(positions)
    greedy, sampled = acceptance(p, drafter.lm_head(states), drafter.draft_token_ids, temperature)
    return torch.stack([losses.float(), greedy, sampled], dim=1).cpu()
