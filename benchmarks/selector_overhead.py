"""
Microseconds that `select` and `update` of each selector take, at 64 arms.

    python benchmarks/selector_overhead.py [--arms 64] [--steps 20000] [--json]

A 10 ms engine step may give 50 of them to the selector. Decisions are taken at every step (`min_dwell_steps=1`), the
worst case; the batch shrinks from 64 to 1 again and again, so refits and all buckets are in the mean.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from tlt_trl.strategy import Strategy, make_selector


def arms(count: int) -> list[Strategy]:
    """Off, and `count - 1` strategies of several drafters with 1 to 21 draft tokens."""
    drafters = [("eagle3", "greedy"), ("eagle3", "probabilistic"), ("ngram", "greedy")]
    all_arms = [Strategy(method, k, sampling) for method, sampling in drafters for k in range(1, 22)]
    return [Strategy.off(), *all_arms[: count - 1]]


def measure(name: str, num_arms: int, steps: int) -> dict[str, float]:
    """Mean, median and 99th percentile of one `select` and one `update` together, in microseconds."""
    rng, selector = random.Random(0), make_selector(name, arms(num_arms), 64, seed=0, min_dwell_steps=1)
    times_us = []
    for step in range(steps):
        if step % 400 == 0:
            selector.start_rollout()
        batch = max(1, 64 >> (step % 400) // 57)
        start = time.perf_counter()
        strategy = selector.select(batch, 100 * batch)
        select_s = time.perf_counter() - start

        k, reached, by_position = strategy.num_draft_tokens, batch, []
        for _ in range(k):
            reached = round(0.8 * reached)
            by_position.append(reached)
        seconds = (0.010 + 0.001 * k + 0.0005 * batch * (k + 1)) * rng.uniform(0.9, 1.1)
        start = time.perf_counter()
        selector.update(strategy, batch, batch + sum(by_position), seconds, 100 * batch, by_position)
        times_us.append(1e6 * (select_s + time.perf_counter() - start))
    return {
        "mean_us": statistics.fmean(times_us),
        "median_us": statistics.median(times_us),
        "p99_us": statistics.quantiles(times_us, n=100)[98],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--arms", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = {name: measure(name, args.arms, args.steps) for name in ("beg_mab", "cost_model", "auto")}
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"| select + update, {args.arms} arms | mean (us) | median (us) | 99th percentile (us) |\n|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['mean_us']:.1f} | {row['median_us']:.1f} | {row['p99_us']:.1f} |")


if __name__ == "__main__":
    main()
