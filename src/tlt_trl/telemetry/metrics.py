"""Names and values of the metrics under `tlt/`; plain arithmetic on sums, so that ranks add up before they divide."""

from collections.abc import Sequence


# Fixed part of the vector that ranks add up; the accepted tokens by position follow it.
SUMMED = ("steps", "speculative_steps", "seconds", "emitted_tokens", "drafts", "draft_tokens")


def rollout_sums(stats, num_positions: int) -> list[float]:
    """
    Flattens a `RolloutStats` into a vector that can be summed across ranks.

    Args:
        stats (`RolloutStats`):
            Statistics of this rank.
        num_positions (`int`):
            Largest number of draft tokens, the same on all ranks.

    Returns:
        `list[float]`: Of length `len(SUMMED) + num_positions`.
    """
    accepted = list(stats.accepted_by_position) + [0] * (num_positions - len(stats.accepted_by_position))
    return [float(getattr(stats, name)) for name in SUMMED] + [float(count) for count in accepted]


def rollout_metrics(sums: Sequence[float], num_ranks: int) -> dict[str, float]:
    """
    Metrics of the rollouts of all ranks.

    Args:
        sums (`Sequence[float]`):
            Sum over ranks of [`rollout_sums`].
        num_ranks (`int`):
            Number of ranks that were summed; rates are per rank-second, times the ranks that run at once.

    Returns:
        `dict[str, float]`: Values by metric name. Acceptance by position is the share of verified drafts whose token
        at that position was accepted; positions that were never drafted are left out.
    """
    total = dict(zip(SUMMED, sums, strict=False))
    accepted = list(sums[len(SUMMED) :])
    metrics = {
        "tlt/acceptance_length": 1.0 + sum(accepted) / total["drafts"] if total["drafts"] else 1.0,
        "tlt/draft_tokens/proposed": total["draft_tokens"],
        "tlt/draft_tokens/accepted": float(sum(accepted)),
        "tlt/rollout/tokens": total["emitted_tokens"],
        "tlt/rollout/seconds": total["seconds"] / num_ranks,
        "tlt/rollout/tokens_per_s": total["emitted_tokens"] / total["seconds"] * num_ranks
        if total["seconds"]
        else 0.0,
        "tlt/speculation_share": total["speculative_steps"] / total["steps"] if total["steps"] else 0.0,
    }
    for position, count in enumerate(accepted):
        if count:
            metrics[f"tlt/acceptance/position_{position}"] = count / total["drafts"]
    return metrics
