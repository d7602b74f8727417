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
    def padded_tokens(self) -> int:
        """Tokens of the batch that the policy is trained on, padding included."""
        return len(self.lengths) * (max(self.prompt_lengths) + max(self.lengths))

    @property
    def rest_s(self) -> float:
        """Neither rollout nor sync nor drafter: mostly scoring and training of the policy, as in plain TRL."""
        return self.seconds - self.rollout_s - self.sync_s - self.drafter_s


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


class TrainingCost:
    """
    What training the policy costs, whoever does it: a part that is the same in every step and one that grows with the
    padded batch, fitted to the steps of both trainers.

    Args:
        steps (`Sequence[TimedStep]`):
            Steps to fit.
    """

    def __init__(self, steps: Sequence[TimedStep]):
        tokens = np.array([[1.0, step.padded_tokens] for step in steps])
        self._coefficients = np.linalg.lstsq(tokens, np.array([step.rest_s for step in steps]), rcond=None)[0]

    def expected_s(self, step: TimedStep) -> float:
        return float(self._coefficients @ (1.0, step.padded_tokens))

    def excess(self, step: TimedStep) -> float:
        """What the step took over what it should have taken."""
        return step.rest_s / self.expected_s(step)

    def noise(self, steps: Sequence[TimedStep]) -> float:
        """
        How much the machine's speed changes from a step to the next: the median of the relative changes of the excess.
        A drift over minutes, which alternating cancels, hardly shows.
        """
        excess = [self.excess(step) for step in steps]
        changes = [abs(math.log(later / earlier)) for earlier, later in zip(excess, excess[1:], strict=False)]
        return math.expm1(statistics.median(changes))

    def seconds_at(self, step: TimedStep, lengths_of: TimedStep) -> float:
        """What a step would have taken with the answers of another: the same rate of sampling, and their padding."""
        rollout_s = step.rollout_s * lengths_of.tokens / step.tokens
        rest_s = self.expected_s(lengths_of) * self.excess(step)
        return rollout_s + rest_s + step.sync_s + step.drafter_s


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
            See [`TrainingCost.noise`]: above it there is no conclusion.
        startup_s (`dict[str, float]`):
            Seconds that building each trainer took.

    Returns:
        `dict[str, Any]`: Ratios are plain over speculative, so that more than 1 is faster; each is the median over
        rounds of the ratio within a round, `*_interval` holds it. Whole steps are compared in three ways: per
        generated token (`step_speedup_per_token`), in seconds (`step_speedup_in_seconds`), and after a correction for
        the different lengths of the answers (`step_speedup`, see [`TrainingCost.seconds_at`]), which varies least
        and which `verdict` goes by. `conclusive` says whether that is one.
    """
    counted = {name: rows[warmup_rounds:] for name, rows in steps.items()}
    plain, speculative = counted[PLAIN], counted[SPECULATIVE]
    cost = TrainingCost(plain + speculative)

    def ratios(value: Callable[[TimedStep], float]) -> list[float]:
        return [value(a) / value(b) for a, b in zip(plain, speculative, strict=True)]

    rollout_speedup = statistics.median(ratios(lambda step: 1.0 / step.rollout_tokens_per_s))
    rollout_share = _total(plain, "rollout_s") / _total(plain, "seconds")
    summary: dict[str, Any] = {"rounds": len(plain)}
    same_work = [a.seconds / cost.seconds_at(b, a) for a, b in zip(plain, speculative, strict=True)]
    for name, values in (
        ("step_speedup", same_work),
        ("step_speedup_per_token", ratios(lambda step: step.ms_per_token)),
        ("step_speedup_in_seconds", ratios(lambda step: step.seconds)),
    ):
        low, high, summary["interval_coverage"] = median_interval(values)
        summary |= {name: statistics.median(values), f"{name}_interval": [low, high]}
    summary |= {
        "rollout_speedup": rollout_speedup,
        "rollout_share": rollout_share,
        "amdahl_bound": amdahl_bound(rollout_share, rollout_speedup),
        "rest_ratio": statistics.median(ratios(cost.excess)),
        "noise": cost.noise(plain),
    }
    summary["share_of_bound"] = summary["step_speedup"] / summary["amdahl_bound"]
    summary["conclusive"], summary["verdict"] = _verdict(summary, max_noise)
    summary |= _accumulated(steps, cost)
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


def _accumulated(steps: dict[str, list[TimedStep]], cost: TrainingCost) -> dict[str, Any]:
    """Sums from the very first step on, as a user would see them on the clock, and at plain TRL's lengths."""
    seconds = {name: np.cumsum([step.seconds for step in rows]) for name, rows in steps.items()}
    pairs = zip(steps[PLAIN], steps[SPECULATIVE], strict=True)
    same_lengths = np.cumsum([cost.seconds_at(own, plain) for plain, own in pairs])
    return {
        "accumulated_speedup": float(seconds[PLAIN][-1] / same_lengths[-1]),
        "accumulated_s": {name: float(values[-1]) for name, values in seconds.items()},
        "below_plain_from_step": below_from_step(same_lengths, seconds[PLAIN]),
        "below_plain_in_seconds_from_step": below_from_step(seconds[SPECULATIVE], seconds[PLAIN]),
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
        "rest_s": statistics.median(step.rest_s for step in rows),
        "padded_tokens": statistics.median(step.padded_tokens for step in rows),
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
    "tlt/payback/net_s",
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
    "tlt/payback/net_s": "saved less spent, by the run's own account, s",
    "rest_s": "all the rest, s",
    "padded_tokens": "tokens of the batch with padding",
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
    seconds = summary["accumulated_s"]
    since, since_in_seconds = (summary[f"below_plain_{key}from_step"] for key in ("", "in_seconds_"))
    lines += [
        "",
        f"* whole step: {_ratio(summary, 'step_speedup')} at the same lengths, "
        f"{_ratio(summary, 'step_speedup_per_token')} per token, {_ratio(summary, 'step_speedup_in_seconds')} in "
        f"seconds; {summary['rounds']} rounds, {summary['interval_coverage']:.0%} intervals",
        f"* rollout {summary['rollout_speedup']:.3f}x, {summary['rollout_share']:.1%} of plain TRL's step: the bound "
        f"(Amdahl) is {summary['amdahl_bound']:.3f}x, of which {summary['share_of_bound']:.1%} is reached",
        f"* all the rest, given the padded batch: {summary['rest_ratio']:.3f}x; noise of it in plain TRL "
        f"{summary['noise']:.1%}",
        f"* from the first step on: {summary['accumulated_speedup']:.3f}x at the same lengths; {seconds[PLAIN]:.1f} s "
        f"and {seconds[SPECULATIVE]:.1f} s on the clock; accumulated time below plain TRL's {_since(since)}, on the "
        f"clock {_since(since_in_seconds)}",
        f"* {summary['verdict']}",
    ]
    return "\n".join(lines)


def _ratio(summary: dict[str, Any], name: str) -> str:
    low, high = summary[f"{name}_interval"]
    return f"{summary[name]:.3f}x ({low:.3f} to {high:.3f})"


def _since(step: int | None) -> str:
    return "never" if step is None else f"from step {step} on"
