"""
Synthetic rollouts with fixed seeds, an oracle that knows the best arm of every step, and the regret of each selector.

    python -m tlt_trl.tools.simulator                       # the table of docs/adaptive_engine.md
    python -m tlt_trl.tools.simulator --replay steps.jsonl  # a recorded run instead (see replay.py)

The number of tokens of a world is fixed by its seed, so the score, tokens/s relative to the oracle, is the oracle's
seconds over the selector's. Machine drift and acceptance follow the tokens done, not the clock, so every selector
meets the same world. The oracle plays, in every step, the arm with most expected tokens/s at that exact batch size and
acceptance. It looks one step ahead: it pays compilation and catch-up of what it plays like everyone else, and does not
plan around them, so a selector may score a little above 100 %.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from ..strategy import make_selector
from ..strategy.selector import Selector
from ..strategy.strategy import Strategy, bucket_edges, bucket_index
from .replay import replay_table


# Measured milliseconds per token of a co-located engine (SmolLM2, 2 threads, speculating and plain alternating), for
# batch sizes 1, 2, 4, 8. Off is the plain engine. At acceptance 0.87 per position a step of k draft tokens emits
# expected_tokens(0.87, k) per request, which turns milliseconds per token into seconds per step.
BATCHES = np.array([1.0, 2.0, 4.0, 8.0])
DRAFT_TOKENS = np.array([0.0, 3.0, 5.0])
MS_PER_TOKEN = np.array([[10.74, 6.14, 5.70], [6.43, 3.34, 2.93], [3.31, 2.00, 2.16], [2.21, 1.75, 1.67]])

SECONDS_PER_CONTEXT_TOKEN = 0.15e-6  # read of the key-value cache
CATCH_UP_S_PER_TOKEN = 0.05e-3  # a drafter that was off reads what it missed, per request and token
DEFAULT_STRATEGIES = (Strategy.off(), Strategy("eagle3", 1), Strategy("eagle3", 3), Strategy("eagle3", 5))


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Tokens per request and step when each draft token is accepted with probability `acceptance`."""
    return sum(acceptance**i for i in range(num_draft_tokens + 1))


STEP_S = 1e-3 * MS_PER_TOKEN * BATCHES[:, None] * [expected_tokens(0.87, int(k)) for k in DRAFT_TOKENS]


@cache
def step_s(batch_size: int, num_draft_tokens: int) -> float:
    """
    Seconds of one step: the measured table, linear between its entries. Beyond batch 8 every further verified token
    costs what it cost plain decoding from batch 4 to 8: large batches are bound by arithmetic, and continuing each
    column on its own would multiply the noise of the table.
    """
    inside = min(batch_size, int(BATCHES[-1]))
    by_batch = [_linear(num_draft_tokens, DRAFT_TOKENS, row) for row in STEP_S]
    seconds_per_verified_token = (STEP_S[-1, 0] - STEP_S[-2, 0]) / (BATCHES[-1] - BATCHES[-2])
    beyond = (batch_size - inside) * (num_draft_tokens + 1) * seconds_per_verified_token
    return float(_linear(inside, BATCHES, by_batch) + beyond)


def _linear(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    i = int(np.clip(np.searchsorted(xs, x), 1, len(xs) - 1))
    return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])


@dataclass(frozen=True)
class Scenario:
    """
    A world for the selectors.

    Args:
        name (`str`):
            Shown in the table.
        acceptance (`Callable[[float, float], float]`):
            Probability that a draft token is accepted, from the share of all rollouts done and the share of the
            tokens of this rollout done.
        batch_sizes (`Sequence[int]`):
            Requests at the start of a rollout; rollouts cycle through them.
        num_rollouts (`int`):
            Rollouts played.
        noise (`float`):
            Standard deviation of the log of one step's seconds.
        drift (`float`):
            Amplitude of the slow drift of the machine (0.15 spans 30 %).
        spikes (`float`):
            Share of steps that take ten times as long.
        compile_s (`float`):
            Cost of the first use of a (batch bucket, draft tokens) shape. The oracle pays it for what it uses.
        tail (`float`):
            Spread of the log of the lengths; small means that all requests finish together.
        uneven (`float`):
            Standard deviation of a fixed log factor on each (batch bucket, draft tokens) shape: padding of captured
            graphs, kernels that switch; nothing that a smooth model of step times can know.
        context_s (`float`):
            Seconds per token of context in a step.
    """

    name: str
    acceptance: Callable[[float, float], float]
    batch_sizes: Sequence[int] = (8, 32, 64, 16)
    num_rollouts: int = 20
    noise: float = 0.05
    drift: float = 0.15
    spikes: float = 0.0
    compile_s: float = 0.0
    tail: float = 0.8
    uneven: float = 0.0
    context_s: float = SECONDS_PER_CONTEXT_TOKEN


SCENARIOS = (
    Scenario("stationary", lambda run, roll: 0.85),
    Scenario("weak drafter", lambda run, roll: 0.3),
    Scenario("drifting acceptance", lambda run, roll: 0.3 + 0.55 * run + 0.05 * np.sin(6 * roll)),
    Scenario("regime flip", lambda run, roll: 0.3 if 0.33 <= run < 0.66 else 0.85),
    Scenario("10x spikes at 2 %", lambda run, roll: 0.85, spikes=0.02),
    Scenario("first-use compile", lambda run, roll: 0.85, compile_s=1.0),
    Scenario("rare buckets", lambda run, roll: 0.75, batch_sizes=(64,), tail=0.05),
    Scenario("small batches", lambda run, roll: 0.7, batch_sizes=(8,)),
    Scenario("uneven step times", lambda run, roll: 0.8, uneven=0.1),
)


@dataclass
class Outcome:
    """What one selector did in one scenario."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    steps_by_strategy: dict[str, int] = field(default_factory=dict)


class World:
    """One scenario under one seed: lengths and drift are drawn here, before any selector plays."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        rng = np.random.default_rng(seed)
        self.seed = seed
        self.lengths = []  # per rollout, shape (batch,)
        for rollout in range(scenario.num_rollouts):
            batch = scenario.batch_sizes[rollout % len(scenario.batch_sizes)]
            draws = 300.0 * np.exp(scenario.tail * rng.standard_normal(batch))
            self.lengths.append(np.clip(draws, 8, 2000).astype(int))
        self.total_tokens = int(sum(lengths.sum() for lengths in self.lengths))
        self.drift_phases = rng.uniform(0, 2 * np.pi, 3)
        self.edges = bucket_edges(max(scenario.batch_sizes))
        longest = max(s.num_draft_tokens for s in DEFAULT_STRATEGIES)
        self.shape_factor = np.exp(scenario.uneven * rng.standard_normal((len(self.edges), longest + 1)))

    def machine(self, tokens_done: int) -> float:
        """Slow factor on all step times: sines with periods of 20, 5 and 1 rollouts."""
        x = 2 * np.pi * tokens_done / self.total_tokens
        waves = np.sin(x * np.array([1.0, 4.0, self.scenario.num_rollouts]) + self.drift_phases)
        return float(np.exp(self.scenario.drift * waves.mean() * 1.5))

    def mean_step_s(self, batch_size: int, k: int, context_tokens: int) -> float:
        factor = self.shape_factor[bucket_index(self.edges, batch_size), k]
        return step_s(batch_size, k) * float(factor) + self.scenario.context_s * context_tokens

    def best(self, arms: Sequence[Strategy], batch_size: int, context_tokens: int, acceptance: float) -> Strategy:
        """The strategy with most expected tokens/s in this very step: what the oracle plays."""

        def tokens_per_s(strategy: Strategy) -> float:
            k = strategy.num_draft_tokens
            return expected_tokens(acceptance, k) / self.mean_step_s(batch_size, k, context_tokens)

        return max(arms, key=tokens_per_s)


def play(world: World, selector: Selector | None, strategies: Sequence[Strategy] = DEFAULT_STRATEGIES) -> Outcome:
    """Plays all rollouts of `world` with `selector`, or with the oracle when it is `None`."""
    scenario, outcome = world.scenario, Outcome()
    rng = np.random.default_rng([world.seed, 1])
    compiled: set[tuple[int, int]] = set()
    for rollout, lengths in enumerate(world.lengths):
        if selector is not None:
            selector.start_rollout()
        remaining, rollout_tokens, missed_steps, context = lengths, int(lengths.sum()), 0, 100 * len(lengths)
        while len(remaining):
            batch, roll_done = len(remaining), 1.0 - remaining.sum() / rollout_tokens
            acceptance = scenario.acceptance((rollout + roll_done) / scenario.num_rollouts, roll_done)
            if selector is None:
                strategy = world.best(strategies, batch, context, acceptance)
            else:
                strategy = selector.select(batch, context)
            k = strategy.num_draft_tokens

            # What the selector sees has noise and spikes; what is scored is its expectation, so that the luck of a
            # few spikes does not decide the table.
            expected_s = world.mean_step_s(batch, k, context) * world.machine(outcome.tokens)
            shape, extra_s = (bucket_index(world.edges, batch), k), 0.0
            if shape not in compiled:
                compiled.add(shape)
                extra_s = scenario.compile_s
            if k:
                extra_s += CATCH_UP_S_PER_TOKEN * missed_steps * batch
            missed_steps = 0 if k else missed_steps + 1
            spike = 10.0 if rng.random() < scenario.spikes else 1.0
            seconds = float(expected_s * np.exp(scenario.noise * rng.standard_normal()) * spike + extra_s)

            accepted = np.cumprod(rng.random((batch, k)) < acceptance, axis=1)  # shape (batch, k)
            emitted = batch + int(accepted.sum())
            if selector is not None:
                by_position = accepted.sum(axis=0).tolist()
                selector.update(strategy, batch, emitted, seconds, context, by_position)

            alive = remaining > 1 + accepted.sum(axis=1)
            outcome.tokens += int(np.minimum(remaining, 1 + accepted.sum(axis=1)).sum())
            context = int((context + emitted) * alive.mean())
            remaining = (remaining - 1 - accepted.sum(axis=1))[alive]
            outcome.seconds += expected_s * (1.0 + 9.0 * scenario.spikes) + extra_s
            outcome.steps += 1
            outcome.steps_by_strategy[str(strategy)] = outcome.steps_by_strategy.get(str(strategy), 0) + 1
    return outcome


PLAYERS = ("off", "eagle3 x1", "eagle3 x3", "eagle3 x5", "beg_mab", "cost_model", "auto")


def make_player(name: str, max_batch_size: int, seed: int) -> Selector:
    """A selector by name, or the fixed one that always plays the strategy of that name."""
    if name in ("beg_mab", "cost_model", "auto"):
        return make_selector(name, DEFAULT_STRATEGIES, max_batch_size, seed)
    if name == "off":
        return make_selector("fixed", [Strategy("eagle3", 1)], max_batch_size, seed, activation_threshold=0)
    return make_selector("fixed", [Strategy.parse(name)], max_batch_size, seed)


def score(scenario: Scenario, seed: int, players: Sequence[str] = PLAYERS) -> dict[str, float]:
    """Tokens/s of each player as a share of the oracle's, in one world."""
    world = World(scenario, seed)
    oracle = play(world, None)
    results = {name: play(world, make_player(name, world.edges[-1], seed)) for name in players}
    return {name: oracle.seconds / outcome.seconds for name, outcome in results.items()}


def table(seeds: Sequence[int], players: Sequence[str] = PLAYERS) -> dict[str, dict[str, float]]:
    """Mean score over the seeds, by scenario and player, with the rows "mean" and "worst" over the scenarios."""
    rows = {}
    for scenario in SCENARIOS:
        scores = [score(scenario, seed, players) for seed in seeds]
        rows[scenario.name] = {name: float(np.mean([s[name] for s in scores])) for name in players}
    scenarios = list(rows.values())
    rows["mean"] = {name: float(np.mean([row[name] for row in scenarios])) for name in players}
    rows["worst"] = {name: min(row[name] for row in scenarios) for name in players}
    return rows


def format_table(rows: dict[str, dict[str, float]]) -> str:
    """Markdown, in percent."""
    players = list(next(iter(rows.values())))
    lines = ["| % of the oracle's tokens/s | " + " | ".join(players) + " |", "|---|" + "---|" * len(players)]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{100 * row[player]:.1f}" for player in players) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the selectors on synthetic or recorded workloads.")
    parser.add_argument("--seeds", type=int, default=5, help="worlds per scenario (default 5)")
    parser.add_argument("--first-seed", type=int, default=100, help="first seed; defaults were tuned on seeds 0 to 4")
    parser.add_argument("--replay", help="JSONL of recorded steps to score instead of the synthetic scenarios")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    rows = replay_table(args.replay, seeds) if args.replay else table(seeds)
    print(json.dumps(rows, indent=2) if args.json else format_table(rows))


if __name__ == "__main__":
    main()
