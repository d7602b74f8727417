"""What steps of two trainers, taken alternately, say about their speed: plain arithmetic, and when it says nothing."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


PLAIN, SPECULATIVE = "plain", "speculative"

# An interval of the median that holds it in nine of ten measurements needs five rounds.
MIN_ROUNDS = 5
MIN_COVERAGE = 0.9


@dataclass(frozen=True, slots=True)
class Workload:
    """
    What both trainers train.

    Attributes:
        name (`str`):
            Of the workload.
        model (`str`):
            Folder or Hub id of the policy.
        dataset (`str`):
            JSONL file; a row has a `prompt` and the columns that the reward function reads.
        reward (`str`):
            Reward function, as `"file.py:function"`.
        config (`dict`):
            Arguments of [`~trl.GRPOConfig`] for both trainers.
        tlt (`dict`):
            Further arguments of [`~tlt_trl.TLTGRPOConfig`], such as `drafter_model_name_or_path`.
        engine (`dict`):
            Arguments of `vllm.LLM` for both engines.
        lora (`dict`, *optional*):
            Arguments of [`~peft.LoraConfig`]; `None` trains all parameters.
        warmup_rounds (`int`):
            Rounds before those whose median counts. They count in the accumulated times.
        rounds (`int`):
            Rounds after them; in a round each trainer takes one step.
    """

    name: str
    model: str
    dataset: str
    reward: str
    config: dict[str, Any] = field(default_factory=dict)
    tlt: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    warmup_rounds: int = 1
    rounds: int = MIN_ROUNDS


@dataclass(frozen=True, slots=True)
class TimedStep:
    """
    One step of one trainer, from the end of the step before to its own.

    Attributes:
        seconds (`float`):
            All of it: data, rollout, scoring, training, optimiser, logs.
        rollout_s (`float`), sync_s (`float`):
            Inside the engine's `generate`, and pushing weights to it.
        prompt_lengths (`list[int]`), lengths (`list[int]`):
            Tokens of the prompts and of the answers.
        logs (`dict[str, float]`):
            What the trainer has logged of the step.
    """

    seconds: float
    rollout_s: float
    sync_s: float
    prompt_lengths: list[int]
    lengths: list[int]
    logs: dict[str, float]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def ms_per_token(self) -> float:
        return 1e3 * self.seconds / self.tokens

    @property
    def rollout_tokens_per_s(self) -> float:
        return self.tokens / self.rollout_s

    @property
    def drafter_s(self) -> float:
        return self.logs.get("tlt/drafter/time_s", 0.0)

    @property
    def rest_ms_per_padded_token(self) -> float:
        """
        What is neither rollout nor sync nor drafter, that is scoring and training of the policy, per token of the
        padded batch: the same work in both trainers and in every step.
        """
        padded = len(self.lengths) * (max(self.prompt_lengths) + max(self.lengths))
        return 1e3 * (self.seconds - self.rollout_s - self.sync_s - self.drafter_s) / padded


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """
    Interval that holds the median of what the values are drawn from, whatever its distribution.

    Returns:
        `tuple[float, float, float]`: Two of the values, the closest with a coverage of at least 0.9 (the lowest and
        the highest value where there are too few for that), and the coverage.
    """
    values = sorted(values)
    count = len(values)

    def coverage(rank: int) -> float:
        return 1.0 - 2.0 * sum(math.comb(count, below) for below in range(rank)) / 2.0**count

    rank = max((r for r in range(1, count // 2 + 1) if coverage(r) >= MIN_COVERAGE), default=1)
    return values[rank - 1], values[count - rank], max(0.0, coverage(rank))


def noise_of(steps: Sequence[TimedStep]) -> float:
    """
    How much the machine's speed changes from a step to the next: the median of the relative changes of the time per
    padded token that training the policy takes. A drift over minutes, which alternating cancels, hardly shows.
    """
    rates = [step.rest_ms_per_padded_token for step in steps]
    changes = [abs(math.log(later / earlier)) for earlier, later in zip(rates, rates[1:], strict=False)]
    return math.expm1(statistics.median(changes))


def amdahl_bound(rollout_share: float, rollout_speedup: float) -> float:
    """Speed-up of a step of which only the rollout becomes faster."""
    return 1.0 / (1.0 - rollout_share + rollout_share / rollout_speedup)


def below_from_step(times: Sequence[float], others: Sequence[float]) -> int | None:
    """First step, counted from 1, from which on `times` stay below `others`; `None` where they do not end below."""
    first = None
    for number, (time, other) in enumerate(zip(times, others, strict=True), start=1):
        if time >= other:
            first = None
        elif first is None:
            first = number
    return first


def summarise(
    steps: dict[str, list[TimedStep]], warmup_rounds: int, max_noise: float, startup_s: dict[str, float]
) -> dict[str, Any]:
    """
    The comparison of a trainer with speculation and a plain one.

    Args:
        steps (`dict[str, list[TimedStep]]`):
            All steps of `"plain"` and `"speculative"`, round by round.
        warmup_rounds (`int`):
            Rounds at the beginning that count in the accumulated times only.
        max_noise (`float`):
            See [`noise_of`]: above it there is no conclusion.
        startup_s (`dict[str, float]`):
            Seconds that building each trainer took.

    Returns:
        `dict[str, Any]`: Ratios are plain over speculative, so that more than 1 is faster; each is the median over
        rounds of the ratio within a round. `step_speedup` compares whole steps per generated token,
        `step_seconds_speedup` whole steps. `conclusive` says whether `verdict` is one.
    """
    counted = {name: rows[warmup_rounds:] for name, rows in steps.items()}
    plain, speculative = counted[PLAIN], counted[SPECULATIVE]

    def ratios(value: Callable[[TimedStep], float]) -> list[float]:
        return [value(a) / value(b) for a, b in zip(plain, speculative, strict=True)]

    step_ratios = ratios(lambda step: step.ms_per_token)
    low, high, coverage = median_interval(step_ratios)
    rollout_speedup = statistics.median(ratios(lambda step: 1.0 / step.rollout_tokens_per_s))
    rollout_share = _total(plain, "rollout_s") / _total(plain, "seconds")
    bound = amdahl_bound(rollout_share, rollout_speedup)
    step_speedup = statistics.median(step_ratios)
    summary = {
        "rounds": len(plain),
        "step_speedup": step_speedup,
        "step_speedup_interval": [low, high],
        "interval_coverage": coverage,
        "step_seconds_speedup": statistics.median(ratios(lambda step: step.seconds)),
        "rollout_speedup": rollout_speedup,
        "rollout_share": rollout_share,
        "amdahl_bound": bound,
        "share_of_bound": step_speedup / bound,
        "rest_ratio": statistics.median(ratios(lambda step: step.rest_ms_per_padded_token)),
        "noise": noise_of(plain),
    }
    summary["conclusive"], summary["verdict"] = _verdict(summary, max_noise)
    summary |= _accumulated(steps)
    for name, rows in counted.items():
        summary[name] = _describe(rows) | {"startup_s": startup_s[name]}
    return _rounded(summary)


def _verdict(summary: dict[str, Any], max_noise: float) -> tuple[bool, str]:
    if summary["rounds"] < MIN_ROUNDS:
        return False, f"no conclusion: {summary['rounds']} rounds, at least {MIN_ROUNDS} are needed"
    if summary["noise"] > max_noise:
        return False, (
            f"no conclusion: the machine is too noisy, plain training changes by {summary['noise']:.0%} from one step "
            f"to the next (median; at most {max_noise:.0%})"
        )
    low, high = summary["step_speedup_interval"]
    kind = "faster" if low > 1.0 else "slower" if high < 1.0 else "no difference shown"
    return True, f"{kind}: {summary['step_speedup']:.3f}x of plain TRL ({low:.3f} to {high:.3f})"


def _accumulated(steps: dict[str, list[TimedStep]]) -> dict[str, Any]:
    """Sums from the very first step on, as a user would see them on the clock."""
    seconds = {name: np.cumsum([step.seconds for step in rows]) for name, rows in steps.items()}
    per_token = {name: seconds[name] / np.cumsum([step.tokens for step in rows]) for name, rows in steps.items()}
    return {
        "accumulated_speedup": float(per_token[PLAIN][-1] / per_token[SPECULATIVE][-1]),
        "accumulated_s": {name: float(values[-1]) for name, values in seconds.items()},
        "below_plain_from_step": below_from_step(seconds[SPECULATIVE], seconds[PLAIN]),
        "below_plain_per_token_from_step": below_from_step(per_token[SPECULATIVE], per_token[PLAIN]),
    }


def _describe(rows: Sequence[TimedStep]) -> dict[str, Any]:
    """One trainer: medians over steps of times, means of what it has logged, percentiles of all answers' lengths."""
    lengths = [length for step in rows for length in step.lengths]
    described: dict[str, Any] = {
        "step_s": statistics.median(step.seconds for step in rows),
        "ms_per_token": statistics.median(step.ms_per_token for step in rows),
        "rollout_tokens_per_s": statistics.median(step.rollout_tokens_per_s for step in rows),
        "rollout_share": _total(rows, "rollout_s") / _total(rows, "seconds"),
        "sync_s": statistics.median(step.sync_s for step in rows),
        "rest_ms_per_padded_token": statistics.median(step.rest_ms_per_padded_token for step in rows),
        "length_p50": float(np.percentile(lengths, 50)),
        "length_p95": float(np.percentile(lengths, 95)),
        "length_max": max(lengths),
    }
    for name in LOGGED:
        values = [step.logs[name] for step in rows if name in step.logs]
        if values:
            described[name] = statistics.mean(values)
    return described


# Means over steps of what TRL and this package log.
LOGGED = (
    "reward",
    "entropy",
    "tlt/acceptance_length",
    "tlt/lookup/acceptance_length",
    "tlt/speculation_share",
    "tlt/drafter/time_s",
    "tlt/feature_capture_s",
)


def _total(rows: Sequence[TimedStep], name: str) -> float:
    return sum(getattr(step, name) for step in rows)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


ROWS = {
    "step_s": "step, s",
    "ms_per_token": "step, ms per generated token",
    "rollout_tokens_per_s": "rollout, tokens/s",
    "rollout_share": "rollout, share of the steps",
    "sync_s": "weight sync, s",
    "tlt/drafter/time_s": "drafter training, s",
    "tlt/feature_capture_s": "copying features, s",
    "rest_ms_per_padded_token": "all the rest, ms per padded token",
    "length_p50": "answer length, median",
    "length_p95": "answer length, 95th percentile",
    "length_max": "answer length, longest",
    "reward": "reward",
    "entropy": "entropy, nats per token",
    "tlt/acceptance_length": "acceptance length, drafter",
    "tlt/lookup/acceptance_length": "acceptance length, lookup",
    "tlt/speculation_share": "steps of the engine that speculate",
}


def format_summary(summary: dict[str, Any]) -> str:
    """A summary as Markdown."""
    plain, speculative = summary[PLAIN], summary[SPECULATIVE]
    lines = ["| median or mean of a step | plain TRL | tlt-trl |", "|---|---|---|"]
    for name, label in ROWS.items():
        if name in plain or name in speculative:
            cells = [f"{row[name]:.4g}" if name in row else "" for row in (plain, speculative)]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    low, high = summary["step_speedup_interval"]
    seconds = summary["accumulated_s"]
    since, since_per_token = (summary[f"below_plain_{key}from_step"] for key in ("", "per_token_"))
    lines += [
        "",
        f"* whole step per token: {summary['step_speedup']:.3f}x, interval {low:.3f} to {high:.3f} "
        f"({summary['interval_coverage']:.0%}, {summary['rounds']} rounds); "
        f"in seconds {summary['step_seconds_speedup']:.3f}x",
        f"* rollout {summary['rollout_speedup']:.3f}x, {summary['rollout_share']:.1%} of plain TRL's step: the bound "
        f"(Amdahl) is {summary['amdahl_bound']:.3f}x, of which {summary['share_of_bound']:.1%} is reached",
        f"* noise of plain training {summary['noise']:.1%}; the same training in plain TRL over here "
        f"{summary['rest_ratio']:.3f}",
        f"* from the first step on: {summary['accumulated_speedup']:.3f}x per token; {seconds[PLAIN]:.1f} s and "
        f"{seconds[SPECULATIVE]:.1f} s; accumulated time below plain TRL's {_since(since)}, per token "
        f"{_since(since_per_token)}",
        f"* {summary['verdict']}",
    ]
    return "\n".join(lines)


def _since(step: int | None) -> str:
    return "never" if step is None else f"from step {step} on"
