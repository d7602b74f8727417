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


def speedup(results: dict[str, list[TimedRollout]], name: str, baseline: str) -> float:
    """Median over rounds of the ratio of tokens per second; sampled lengths differ, so seconds alone would not do."""
    pairs = zip(results[name], results[baseline], strict=True)
    return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)
