"""
`tlt-trl bench`: engines compared in one process, alternating, because the speed of one machine drifts more than what
is measured.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from ..generation.engine import RolloutEngine
from ..generation.rollout_loop import RolloutLoop
from ..generation.standalone import build_llm, completion_ids
from ..strategy import make_selector
from .prompts import prompt_format_of, read_prompts


if TYPE_CHECKING:
    from vllm import LLM


# Completion token ids for prompts and a seed.
Generate = Callable[[Sequence[list[int]], int], list[list[int]]]


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


def timed_rollout(generate: Generate, prompts: Sequence[list[int]], seed: int) -> TimedRollout:
    """Times `generate(prompts, seed)`, which returns the completion token ids of every prompt."""
    started = time.perf_counter()
    completions = generate(prompts, seed)
    return TimedRollout(time.perf_counter() - started, tuple(len(ids) for ids in completions))


def compare_rollouts(
    engines: dict[str, Generate],
    prompts: Sequence[list[int]],
    rounds: int = 3,
    warmup_rounds: int = 1,
    seed: int = 0,
) -> dict[str, list[TimedRollout]]:
    """
    Times engines on the same prompts, alternating.

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
    for number in tqdm(range(warmup_rounds + rounds), desc="engines, alternating", unit="round"):
        names = list(engines) if number % 2 == 0 else list(reversed(engines))
        for name in names:
            rollout = timed_rollout(engines[name], prompts, seed + number)
            if number >= warmup_rounds:
                results[name].append(rollout)
    return results


def strategy_table(results: dict[str, list[TimedRollout]], plain: str, adaptive: str) -> dict:
    """
    An adaptive engine compared with a plain one and with every fixed strategy.

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
    speedups = {name: round(speedup(results, name, plain), 3) for name in results}
    rows = [
        {
            "name": name,
            "tokens_per_s": round(statistics.median(r.tokens_per_s for r in rollouts), 1),
            "speedup": speedups[name],
        }
        for name, rollouts in results.items()
    ]
    fixed = [name for name in results if name not in (plain, adaptive)]
    best = max(fixed, key=speedups.__getitem__)
    return {
        "rows": rows,
        "best_fixed": best,
        "adaptive_over_best_fixed": round(speedup(results, adaptive, best), 3),
        "adaptive_over_plain": round(speedup(results, adaptive, plain), 3),
        "adaptive_over_fixed": {name: round(speedup(results, adaptive, name), 3) for name in fixed},
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


def run_rollout(args: argparse.Namespace) -> int:
    """`tlt-trl bench rollout`."""
    prompts = read_prompts(args.prompts, AutoTokenizer.from_pretrained(args.model), prompt_format_of(args))
    prompts = [prompts[i % len(prompts)] for i in range(args.num_prompts)]
    plain, speculative = _engine_pair(args.model, args.drafter, prompts, args.max_completion_length, args)
    selector = make_selector(args.selector, args.strategies, args.max_num_seqs, seed=args.seed)
    loop = RolloutLoop(RolloutEngine(speculative, fast_cpu_sampling=not args.stock_sampler), selector)

    sampling = {"temperature": args.temperature, "max_tokens": args.max_completion_length}
    competitors = {
        "plain": _competitor(plain, None, **sampling),
        "speculative": _competitor(speculative, loop, **sampling),
    }
    results = compare_rollouts(competitors, prompts, rounds=args.rounds, seed=args.seed)
    stats = loop.pop_stats()
    summary = {
        "rollout_speedup": round(speedup(results, "speculative", "plain"), 3),
        "acceptance_length": round(stats.acceptance_length, 3),
        "accepted_by_position": [round(share, 3) for share in stats.acceptance_by_position],
        "steps_by_strategy": loop.pop_ledger().steps_by_strategy(),
    }
    for name, rollouts in results.items():
        summary[f"{name}_tokens_per_s"] = round(statistics.median(r.tokens_per_s for r in rollouts), 1)
        summary[f"{name}_mean_length"] = round(statistics.mean(n for r in rollouts for n in r.lengths), 1)
    if args.output is not None:
        raw = {"summary": summary, "rollouts": _raw(results), "selector": selector.summary()}
        args.output.write_text(json.dumps(raw))
    print(json.dumps(summary))
    return 0


def run_strategies(args: argparse.Namespace) -> int:
    """`tlt-trl bench strategies`."""
    if not args.cases.exists():
        sys.exit(
            f"{args.cases} does not exist. In a clone `make bench-strategies` makes the standard cases and runs this "
            "command; for models of your own write a JSON list of "
            '{"name": ..., "model": ..., "drafter": ..., "prompts": "prompts.jsonl", "max_completion_length": 256} '
            "and name it with --cases."
        )
    tables, raw = [], []
    for case in json.loads(args.cases.read_text()):
        table, rollouts = _compare_strategies(case, args)
        tables.append({"case": case["name"], **table})
        raw.append({"case": case, "table": table, "rollouts": rollouts})
        if not args.json:
            print(f"\n{case['name']}\n\n{format_table(table)}\n")
            print(f"adaptive over the best fixed ({table['best_fixed']}): {table['adaptive_over_best_fixed']:.3f}")
    if args.output is not None:
        args.output.write_text(json.dumps({"arguments": sys.argv[1:], "cases": raw}, indent=1) + "\n")
    if args.json:
        print(json.dumps({"tables": tables}))
    return 0


def _compare_strategies(case: dict, args: argparse.Namespace) -> tuple[dict, dict]:
    """The table of one case, and what it was computed from."""
    prompts = read_prompts(Path(case["prompts"]), AutoTokenizer.from_pretrained(case["model"]))
    plain, speculative = _engine_pair(case["model"], case["drafter"], prompts, case["max_completion_length"], args)
    engine = RolloutEngine(speculative)
    adaptive = make_selector(args.selector, args.strategies, args.max_num_seqs, seed=args.seed)
    selectors = {"off": make_selector("fixed", args.strategies[:1], args.max_num_seqs, activation_threshold=0)}
    selectors |= {str(strategy): make_selector("fixed", [strategy], args.max_num_seqs) for strategy in args.strategies}
    selectors["adaptive"] = adaptive

    sampling = {"temperature": args.temperature, "max_tokens": case["max_completion_length"]}
    competitors = {"plain": _competitor(plain, None, **sampling)}
    for name, selector in selectors.items():
        competitors[name] = _competitor(speculative, RolloutLoop(engine, selector), **sampling)
    results = compare_rollouts(
        competitors, prompts, rounds=args.rounds, warmup_rounds=args.warmup_rounds, seed=args.seed
    )
    return strategy_table(results, "plain", "adaptive"), {"rollouts": _raw(results), "selector": adaptive.summary()}


def _engine_pair(
    model: str, drafter: str, prompts: list[list[int]], max_completion_length: int, args: argparse.Namespace
) -> tuple["LLM", "LLM"]:
    """A plain engine and one with a drafter, in this process and with room for the same requests."""
    shape = {
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": max(map(len, prompts)) + max_completion_length,
        "seed": args.seed,
    }
    plain = build_llm(model, **shape)
    samplings = {strategy.draft_sampling for strategy in args.strategies}
    speculative = build_llm(
        model,
        drafter=drafter,
        max_draft_tokens=max(strategy.num_draft_tokens for strategy in args.strategies),
        draft_sampling="probabilistic" if "probabilistic" in samplings else "greedy",
        **shape,
    )
    return plain, speculative


def _competitor(llm: "LLM", loop: RolloutLoop | None, **sampling: Any) -> Generate:
    """What [`compare_rollouts`] times: an engine, stepped by a loop if there is one."""

    def generate(prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
        torch.manual_seed(seed)  # the engines live in this process and sample from its random state
        llm.rollout_loop = loop
        return completion_ids(llm, prompts, logprobs=0, **sampling)

    return generate


def _raw(results: dict[str, list[TimedRollout]]) -> dict[str, list[dict]]:
    return {name: [{"seconds": r.seconds, "lengths": r.lengths} for r in rows] for name, rows in results.items()}
