"""Names and values of the metrics under `tlt/`: plain arithmetic on what ranks have added up."""

from collections.abc import Mapping


def rollout_metrics(total: Mapping[str, float], num_positions: int, num_engines: int) -> dict[str, float]:
    """
    Metrics of the rollouts of all ranks.

    Args:
        total (`Mapping[str, float]`):
            Sum over engines of `RolloutStats.sums`.
        num_positions (`int`):
            Largest number of draft tokens.
        num_engines (`int`):
            Number of engines that were summed; rates are per engine-second, times the engines that run at once.

    Returns:
        `dict[str, float]`: Values by metric name. Acceptance is that of the drafter's own tokens. By position, counted
        from 1, it is the share of them that was accepted there, 0.0 when none was; positions that were never drafted
        are left out, and so is `tlt/lookup/` where nothing was looked up.
    """
    positions = range(1, num_positions + 1)
    accepted = sum(total[f"accepted_{position}"] for position in positions)
    tokens_per_s = total["emitted_tokens"] / total["time_s"] * num_engines if total["time_s"] else 0.0
    metrics = {
        "tlt/acceptance_length": 1.0 + accepted / total["drafts"] if total["drafts"] else 1.0,
        "tlt/draft_tokens/proposed": total["draft_tokens"],
        "tlt/draft_tokens/accepted": accepted,
        "tlt/rollout/tokens": total["emitted_tokens"],
        "tlt/rollout/time_s": total["time_s"] / num_engines,
        "tlt/rollout/tokens_per_s": tokens_per_s,
        "tlt/speculation_share": total["speculative_steps"] / total["steps"] if total["steps"] else 0.0,
    }
    if total["lookups"]:
        metrics["tlt/lookup/acceptance_length"] = 1.0 + total["accepted_lookup_tokens"] / total["lookups"]
        metrics["tlt/lookup/proposed"] = total["lookup_tokens"]
        metrics["tlt/lookup/accepted"] = total["accepted_lookup_tokens"]
    for position in positions:
        if total[f"drafted_{position}"]:
            share = total[f"accepted_{position}"] / total[f"drafted_{position}"]
            metrics[f"tlt/acceptance/position_{position}"] = share
    return metrics


def step_metric_names(unroll_steps: int) -> list[str]:
    """What drafter training reports of every optimiser step."""
    by_step = [f"{name}_{step}" for name in ("loss", "acceptance") for step in range(1, unroll_steps + 1)]
    return ["loss", "acceptance_length", "grad_norm", *by_step]


def training_metrics(total: Mapping[str, float], num_ranks: int, unroll_steps: int) -> dict[str, float]:
    """
    Metrics of the drafter training of all ranks in one step.

    Args:
        total (`Mapping[str, float]`):
            Numbers of a `TrainingReport` of all ranks, the sums of its metrics, `feature_capture_s` and
            `buffer_tokens`.
        num_ranks (`int`):
            Number of ranks.
        unroll_steps (`int`):
            Draft steps trained.

    Returns:
        `dict[str, float]`: Values by metric name. Times are means over ranks, latencies are those of the slowest rank,
        counts are sums; losses and acceptances are means over all optimiser steps, absent when there was none, as is
        the used fraction when nobody waited.
    """
    metrics = {
        "tlt/idle_s": total["idle_s"] / num_ranks,
        "tlt/stop_latency_s": total["stop_latency_s"],
        "tlt/idle_added_s": total["idle_added_s"],
        "tlt/drafter_tokens": total["tokens"],
        "tlt/feature_capture_s": total["feature_capture_s"] / num_ranks,
        "tlt/buffer/tokens": total["buffer_tokens"] / num_ranks,
        "tlt/drafter/steps": total["steps"],
        "tlt/drafter/time_s": total["time_s"] / num_ranks,
        "tlt/drafter/dropped_batches": total["dropped_batches"],
        "tlt/drafter/failures": total["failures"],
        "tlt/drafter/starved": total["starved"],
        "tlt/drafter/interrupted": total["interrupted"],
    }
    if total["idle_s"]:
        metrics["tlt/idle_used_fraction"] = total["idle_used_s"] / total["idle_s"]
    if total["steps"]:
        metrics |= {f"tlt/drafter/{name}": total[name] / total["steps"] for name in step_metric_names(unroll_steps)}
    return metrics
