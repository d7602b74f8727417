"""Names and values of the metrics under `tlt/`; plain arithmetic on sums, so that ranks add up before they divide."""

from collections.abc import Sequence


# Fixed part of the vector that ranks add up; drafted and accepted tokens by position follow it.
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
        `list[float]`: Of length `len(SUMMED) + 2 * num_positions`.
    """
    sums = [float(getattr(stats, name)) for name in SUMMED]
    for counts in (stats.drafted_by_position, stats.accepted_by_position):
        sums += [float(count) for count in counts] + [0.0] * (num_positions - len(counts))
    return sums


def rollout_metrics(sums: Sequence[float], num_ranks: int) -> dict[str, float]:
    """
    Metrics of the rollouts of all ranks.

    Args:
        sums (`Sequence[float]`):
            Sum over ranks of [`rollout_sums`].
        num_ranks (`int`):
            Number of ranks that were summed; rates are per rank-second, times the ranks that run at once.

    Returns:
        `dict[str, float]`: Values by metric name. Acceptance by position is the share of the draft tokens at that
        position that was accepted, 0.0 when none was; positions that were never drafted are left out.
    """
    total = dict(zip(SUMMED, sums, strict=False))
    by_position = sums[len(SUMMED) :]
    num_positions = len(by_position) // 2
    drafted, accepted = by_position[:num_positions], by_position[num_positions:]
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
    for position, (num_drafted, num_accepted) in enumerate(zip(drafted, accepted, strict=True)):
        if num_drafted:
            metrics[f"tlt/acceptance/position_{position}"] = num_accepted / num_drafted
    return metrics
