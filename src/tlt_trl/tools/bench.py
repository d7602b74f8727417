"""Comparing engines in one process, by turns, because the speed of one machine drifts more than what is measured."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tqdm.auto import tqdm


@dataclass(frozen=True, slots=True)
class TimedRollout:
    """
    One rollout of one engine.

    Attributes:
        seconds (`float`):
            Wall-clock time.
        lengths (`tuple[int, ...]`):
            Completion tokens of every sample.
    """

    seconds: float
    lengths: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(self.lengths) / self.seconds


def timed_rollout(generate: Callable[[Sequence[list[int]], int], list[list[int]]], prompts, seed: int) -> TimedRollout:
    """Times `generate(prompts, seed)`, which returns the completion token ids of every prompt."""
    started = time.perf_counter()
    completions = generate(prompts, seed)
    return TimedRollout(time.perf_counter() - started, tuple(len(ids) for ids in completions))


def compare_rollouts(
    engines: dict[str, Callable[[Sequence[list[int]], int], list[list[int]]]],
    prompts: Sequence[list[int]],
    rounds: int = 3,
    warmup_rounds: int = 1,
    seed: int = 0,
) -> dict[str, list[TimedRollout]]:
    """
    Lets engines take turns on the same prompts.

    Args:
        engines (`dict[str, Callable]`):
            For each name a function that generates for prompts and a seed. The order within a round alternates.
        prompts (`Sequence[list[int]]`):
            Prompt token ids.
        rounds (`int`, *optional*, defaults to `3`):
            Rounds that count.
        warmup_rounds (`int`, *optional*, defaults to `1`):
            Rounds before them that do not (first-use compilation, and a selector's first exploration).
        seed (`int`, *optional*, defaults to `0`):
            Seed of the first round; the following ones count up from it.

    Returns:
        `dict[str, list[TimedRollout]]`: The counted rollouts of every engine.
    """
    results: dict[str, list[TimedRollout]] = {name: [] for name in engines}
    for number in tqdm(range(warmup_rounds + rounds), desc="engines by turns", unit="round"):
        names = list(engines) if number % 2 == 0 else list(reversed(engines))
        for name in names:
            rollout = timed_rollout(engines[name], prompts, seed + number)
            if number >= warmup_rounds:
                results[name].append(rollout)
    return results


def strategy_table(results: dict[str, list[TimedRollout]], plain: str, adaptive: str) -> dict:
    """
    An adaptive engine beside a plain one and beside every fixed strategy.

    Args:
        results (`dict[str, list[TimedRollout]]`):
            What [`compare_rollouts`] returned.
        plain (`str`), adaptive (`str`):
            Names of the plain engine and of the adaptive one; all others are fixed strategies.

    Returns:
        `dict`: `rows`, one for each name with its median tokens per second and its speed-up over the plain engine;
        `best_fixed`, the fixed strategy with the highest speed-up; and `adaptive_over_best_fixed`,
        `adaptive_over_plain`, and `adaptive_over_fixed` by name, medians over rounds of the ratio in the same round.
    """
    rows = [
        {
            "name": name,
            "tokens_per_s": round(statistics.median(r.tokens_per_s for r in rollouts), 1),
            "speedup": round(speedup(results, name, plain), 3),
        }
        for name, rollouts in results.items()
    ]
    fixed = [row for row in rows if row["name"] not in (plain, adaptive)]
    best = max(fixed, key=lambda row: row["speedup"])["name"]
    return {
        "rows": rows,
        "best_fixed": best,
        "adaptive_over_best_fixed": round(speedup(results, adaptive, best), 3),
        "adaptive_over_plain": round(speedup(results, adaptive, plain), 3),
        "adaptive_over_fixed": {row["name"]: round(speedup(results, adaptive, row["name"]), 3) for row in fixed},
    }


def format_table(table: dict) -> str:
    """The rows of [`strategy_table`] as Markdown."""
    lines = ["| strategy | tokens/s | speed-up over plain |", "|---|---|---|"]
    lines += [f"| {row['name']} | {row['tokens_per_s']:.1f} | {row['speedup']:.2f} |" for row in table["rows"]]
    return "\n".join(lines)


def speedup(results: dict[str, list[TimedRollout]], name: str, baseline: str) -> float:
    """Median over rounds of the ratio of tokens per second; sampled lengths differ, so seconds alone would not do."""
    pairs = zip(results[name], results[baseline], strict=True)
    return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)
