"""What speculation paid in a rollout: the steps by batch size and strategy, priced with the selector's rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .selector import Selector
from .strategy import Strategy, bucket_edges, bucket_index


class StepLedger:
    """
    Counts the steps of a rollout and says afterwards what they were worth.

    Only steady steps are priced, those that verified what the same strategy proposed, since in the others tokens and
    seconds belong to different strategies.

    Args:
        selector ([`Selector`]):
            Whose strategies are counted and whose expected rates they are priced with.
    """

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self._arm_of = {strategy: arm for arm, strategy in enumerate(selector.strategies)}
        self._steps = [0] * len(selector.strategies)
        # (arm, batch size) -> [steps, tokens, seconds, context tokens], sums over steady steps
        self._cells: dict[tuple[int, int], list[float]] = {}

    def add(
        self, strategy: Strategy, batch_size: int, tokens: int, seconds: float, context_tokens: int, steady: bool
    ) -> None:
        """Takes note of one engine step."""
        arm = self._arm_of[strategy]
        self._steps[arm] += 1
        if steady:
            cell = self._cells.setdefault((arm, batch_size), [0, 0, 0.0, 0])
            for position, value in enumerate((1, tokens, seconds, context_tokens)):
                cell[position] += value

    def steps_by_strategy(self) -> dict[str, int]:
        """Engine steps of every strategy that was played."""
        return {str(s): steps for s, steps in zip(self.selector.strategies, self._steps, strict=True) if steps}

    def sums(self) -> dict[str, float]:
        """
        Numbers that add up across ranks.

        Returns:
            `dict[str, float]`: Steps of every strategy by its name, and seconds that the tokens of the priced steps
            took (`measured_s`), would have been predicted to take (`predicted_s`), would have taken without
            speculation (`off_s`), and with the best strategy at each batch size (`best_s`). Where the selector has no
            opinion about the strategy played or about "off", a step is not priced. `saved_s` is by which all steps
            with drafts were shorter than without: a strategy's unpriced steps count as its priced ones do, and steps
            without drafts save nothing, however far the prediction for them is off.
        """
        measured = predicted = off = best = 0.0
        off_arm = self._arm_of.get(Strategy.off())
        priced_steps = [0.0] * len(self._steps)
        saved_s = [0.0] * len(self._steps)
        for (arm, batch_size), (steps, tokens, seconds, context_tokens) in self._cells.items():
            rates = self.selector.expected_tokens_per_s(batch_size, context_tokens / steps)
            rate, off_rate = rates[arm], None if off_arm is None else rates[off_arm]
            if rate is None or off_rate is None:
                continue
            measured += seconds
            predicted += tokens / rate
            off += tokens / off_rate
            best += tokens / max(rate for rate in rates if rate is not None)
            priced_steps[arm] += steps
            saved_s[arm] += tokens / off_rate - seconds
        arms = [arm for arm, priced in enumerate(priced_steps) if priced and arm != off_arm]
        saved = sum(saved_s[arm] * self._steps[arm] / priced_steps[arm] for arm in arms)
        counts = {str(s): float(count) for s, count in zip(self.selector.strategies, self._steps, strict=True)}
        seconds_of = {"measured_s": measured, "predicted_s": predicted, "off_s": off, "best_s": best, "saved_s": saved}
        return counts | seconds_of

    def choices(self) -> list[tuple[int, int, Strategy]]:
        """
        What was played most in each range of batch sizes.

        Returns:
            `list[tuple[int, int, Strategy]]`: Smallest and largest batch size and the strategy, smallest first;
            neighbouring buckets with the same strategy are one range.
        """
        edges = bucket_edges(max((batch for _, batch in self._cells), default=1))
        steps: dict[int, dict[int, int]] = {}
        for (arm, batch_size), cell in self._cells.items():
            by_arm = steps.setdefault(bucket_index(edges, batch_size), {})
            by_arm[arm] = by_arm.get(arm, 0) + int(cell[0])
        ranges: list[tuple[int, int, Strategy]] = []
        for bucket in sorted(steps):
            strategy = self.selector.strategies[max(steps[bucket], key=steps[bucket].__getitem__)]
            low = edges[bucket - 1] + 1 if bucket else 1
            if ranges and ranges[-1][2] == strategy:
                low = ranges.pop()[0]
            ranges.append((low, edges[bucket], strategy))
        return ranges


def ledger_metrics(strategies: Sequence[Strategy], total: Mapping[str, float]) -> dict[str, float]:
    """
    Metrics from the sum over ranks of [`StepLedger.sums`].

    Args:
        strategies (`Sequence[Strategy]`):
            The selector's strategies.
        total (`Mapping[str, float]`):
            The sum.

    Returns:
        `dict[str, float]`: Share of the steps of every strategy that was played; where steps could be priced, the
        speed-up over "off" as predicted and as measured, and the share of the time that a better strategy would have
        saved (`regret`, an estimate with the selector's own rates).
    """
    steps = {str(strategy): total[str(strategy)] for strategy in strategies}
    num_steps = sum(steps.values())
    metrics = {f"tlt/strategy/{name.replace(' ', '_')}": count / num_steps for name, count in steps.items() if count}
    if total["measured_s"]:
        metrics["tlt/speculation/predicted_speedup"] = total["off_s"] / total["predicted_s"]
        metrics["tlt/speculation/measured_speedup"] = total["off_s"] / total["measured_s"]
        metrics["tlt/speculation/regret"] = 1.0 - total["best_s"] / total["predicted_s"]
    return metrics


def describe(metrics: dict[str, float], choices: Sequence[tuple[int, int, Strategy]]) -> str:
    """
    One line on what speculation did.

    ```python
    >>> describe(
    ...     {"tlt/speculation/predicted_speedup": 1.62, "tlt/speculation/measured_speedup": 1.55},
    ...     [(1, 4, Strategy("eagle3", 3)), (5, 16, Strategy.off())],
    ... )
    'speculation: paying 1.62x (measured 1.55x), 3 draft tokens at batch 1-4, off at batch 5-16'
    ```
    """
    parts = [
        f"{_name(strategy)} at batch {low if low == high else f'{low}-{high}'}" for low, high, strategy in choices
    ]
    if "tlt/speculation/predicted_speedup" in metrics:
        predicted, measured = (metrics[f"tlt/speculation/{name}_speedup"] for name in ("predicted", "measured"))
        parts.insert(0, f"paying {predicted:.2f}x (measured {measured:.2f}x)")
    return "speculation: " + (", ".join(parts) if parts else "no steady step")


def _name(strategy: Strategy) -> str:
    if strategy.is_off:
        return "off"
    kind = {"eagle3": "draft", "ngram": "n-gram"}[strategy.method]
    sampled = " sampled" if strategy.draft_sampling == "probabilistic" else ""
    return f"{strategy.num_draft_tokens}{sampled} {kind} token{'s' if strategy.num_draft_tokens > 1 else ''}"
