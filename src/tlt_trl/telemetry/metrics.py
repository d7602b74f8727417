"""Names and values of the metrics under `tlt/`; plain arithmetic on sums, so that ranks add up before they divide."""

from collections.abc import Mapping, Sequence


# Fixed part of the vector that ranks add up; drafted and accepted tokens by position follow it.
SUMMED = (
    "steps",
    "speculative_steps",
    "seconds",
    "emitted_tokens",
    "drafts",
    "draft_tokens",
    "lookups",
    "lookup_tokens",
    "accepted_lookup_tokens",
)


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


def rollout_metrics(sums: Sequence[float], num_engines: int) -> dict[str, float]:
    """
    Metrics of the rollouts of all ranks.

    Args:
        sums (`Sequence[float]`):
            Sum over engines of [`rollout_sums`].
        num_engines (`int`):
            Number of engines that were summed; rates are per engine-second, times the engines that run at once.

    Returns:
        `dict[str, float]`: Values by metric name. Acceptance is that of the drafter's own tokens. By position it is
        the share of them that was accepted there, 0.0 when none was; positions that were never drafted are left out,
        and so is `tlt/lookup/` where nothing was looked up.
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
        "tlt/rollout/seconds": total["seconds"] / num_engines,
        "tlt/rollout/tokens_per_s": total["emitted_tokens"] / total["seconds"] * num_engines
        if total["seconds"]
        else 0.0,
        "tlt/speculation_share": total["speculative_steps"] / total["steps"] if total["steps"] else 0.0,
    }
    if total["lookups"]:
        metrics["tlt/lookup/acceptance_length"] = 1.0 + total["accepted_lookup_tokens"] / total["lookups"]
        metrics["tlt/lookup/proposed"] = total["lookup_tokens"]
        metrics["tlt/lookup/accepted"] = total["accepted_lookup_tokens"]
    for position, (num_drafted, num_accepted) in enumerate(zip(drafted, accepted, strict=True)):
        if num_drafted:
            metrics[f"tlt/acceptance/position_{position}"] = num_accepted / num_drafted
    return metrics


# ---- drafter training ---------------------------------------------------------------------------------------------

# Of one rank and training step; added up over the periods of training in a step and over ranks, the last two
# maximised.
TRAINING_SUMS = (
    "idle_s",
    "idle_used_s",
    "tokens",
    "steps",
    "seconds",
    "dropped_batches",
    "failures",
    "starved",
    "interrupted",
    "feature_capture_s",
    "buffer_tokens",
)
TRAINING_MAXIMA = ("stop_latency_s", "idle_added_s")


def _means(unroll_steps: int) -> list[str]:
    """What training reports as a mean over its optimiser steps."""
    by_step = [f"{name}_{step}" for name in ("loss", "acceptance") for step in range(1, unroll_steps + 1)]
    return ["loss", "acceptance_length", "grad_norm", *by_step]


def training_vector(report: Mapping[str, float], unroll_steps: int) -> list[float]:
    """
    Flattens a report of drafter training into a vector that [`add_training_vectors`] adds up. What is missing is 0.

    Args:
        report (`Mapping[str, float]`):
            Values by name: those of `TRAINING_SUMS` and `TRAINING_MAXIMA`, and means over the report's `steps`.
        unroll_steps (`int`):
            Draft steps trained, the same on all ranks.
    """
    fixed = [float(report.get(name, 0.0)) for name in TRAINING_SUMS + TRAINING_MAXIMA]
    return fixed + [report.get("steps", 0.0) * report.get(name, 0.0) for name in _means(unroll_steps)]


def add_training_vectors(vectors: Sequence[Sequence[float]]) -> list[float]:
    """Adds up vectors of [`training_vector`]; the entries of `TRAINING_MAXIMA` are maximised."""
    first, last = len(TRAINING_SUMS), len(TRAINING_SUMS) + len(TRAINING_MAXIMA)
    columns = zip(*vectors, strict=True)
    return [max(column) if first <= i < last else sum(column) for i, column in enumerate(columns)]


def training_metrics(vector: Sequence[float], num_ranks: int, unroll_steps: int) -> dict[str, float]:
    """
    Metrics of the drafter training of all ranks in one step.

    Args:
        vector (`Sequence[float]`):
            Vectors of all ranks, added up.
        num_ranks (`int`):
            Number of ranks.
        unroll_steps (`int`):
            Draft steps trained.

    Returns:
        `dict[str, float]`: Values by metric name. Times are means over ranks, latencies are those of the slowest rank,
        counts are sums; losses and acceptances are means over all optimiser steps, absent when there was none, as is
        the used fraction when nobody waited.
    """
    names = [*TRAINING_SUMS, *TRAINING_MAXIMA, *_means(unroll_steps)]
    total = dict(zip(names, vector, strict=True))
    metrics = {
        "tlt/idle_s": total["idle_s"] / num_ranks,
        "tlt/stop_latency_s": total["stop_latency_s"],
        "tlt/idle_added_s": total["idle_added_s"],
        "tlt/drafter_tokens": total["tokens"],
        "tlt/feature_capture_s": total["feature_capture_s"] / num_ranks,
        "tlt/buffer/tokens": total["buffer_tokens"] / num_ranks,
        "tlt/drafter/steps": total["steps"],
        "tlt/drafter/seconds": total["seconds"] / num_ranks,
        "tlt/drafter/dropped_batches": total["dropped_batches"],
        "tlt/drafter/failures": total["failures"],
        "tlt/drafter/starved": total["starved"],
        "tlt/drafter/interrupted": total["interrupted"],
    }
    if total["idle_s"]:
        metrics["tlt/idle_used_fraction"] = total["idle_used_s"] / total["idle_s"]
    if total["steps"]:
        metrics |= {f"tlt/drafter/{name}": total[name] / total["steps"] for name in _means(unroll_steps)}
    return metrics
