"""Command line: `tlt-trl warmup`, `tlt-trl bench`, `tlt-trl doctor` and `tlt-trl timeline`."""

import argparse
import json
import logging
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tlt-trl", description="Tools around speculative rollouts for TRL.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_warmup(commands)
    _add_bench(commands)
    _add_doctor(commands)
    _add_timeline(commands)
    args = parser.parse_args(argv)
    # vLLM logs every detail of its start-up; an answer to a command should not drown in it.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.basicConfig(level=logging.WARNING)
    return args.run(args)


# More than a warm-up goes through; tokenising a whole data set takes longer than the warm-up.
MAX_DATASET_PROMPTS = 4096


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    _add_policy_options(parser)
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL, one prompt a line under the key 'prompt'")


def _add_policy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or Hub id of the policy")
    parser.add_argument("--max_completion_length", type=int, default=256, help="tokens per answer at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)


def read_prompts(path: Path, tokenizer) -> list[list[int]]:
    """
    Token ids of the prompts of a JSONL file, tokenised as TRL does it: a drafter is sensitive to the prefix.

    Args:
        path (`Path`):
            File with one JSON object a line; `prompt` is a text or a list of messages.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.
    """
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        row = json.loads(line)
        if "prompt" not in row:
            raise ValueError(f"{path}, line {number}: no key 'prompt', only {sorted(row)}.")
        prompts.append(_prompt_ids(row["prompt"], tokenizer))
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    return prompts


def _prompt_ids(prompt: str | list[dict], tokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return rendered["input_ids"]


def read_dataset_prompts(name: str, split: str, column: str, tokenizer) -> list[list[int]]:
    """
    Token ids of the prompts of a data set, tokenised as by [`read_prompts`].

    Args:
        name (`str`):
            Hub id, or a folder or JSON, JSONL or Parquet file of this machine.
        split (`str`):
            Split of the data set. Of a large one a random part is taken.
        column (`str`):
            Column that holds texts or lists of messages.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.
    """
    from datasets import load_dataset

    file_types = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
    path = Path(name)
    if path.is_file():
        if path.suffix not in file_types:
            raise ValueError(f"--dataset {name}: a file must end in {', '.join(file_types)}.")
        dataset = load_dataset(file_types[path.suffix], data_files=name, split=split)
    else:
        dataset = load_dataset(name, split=split)
    if column not in dataset.column_names:
        raise ValueError(
            f"The data set {name} has no column {column!r}, only {dataset.column_names}. Name it with --prompt_column."
        )
    if not len(dataset):
        raise ValueError(f"The data set {name} holds no prompts.")
    if len(dataset) > MAX_DATASET_PROMPTS:
        dataset = dataset.shuffle(seed=0).select(range(MAX_DATASET_PROMPTS))
    return [_prompt_ids(prompt, tokenizer) for prompt in dataset[column]]


# ---- warmup -------------------------------------------------------------------------------------------------------


def _add_warmup(commands) -> None:
    parser = commands.add_parser("warmup", help="make a first drafter from a policy's own answers")
    _add_policy_options(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompts", type=Path, help="JSONL, one prompt a line under the key 'prompt'")
    prompts.add_argument("--dataset", help="Hub id, folder or file that `datasets.load_dataset` takes")
    parser.add_argument("--dataset_split", default="train")
    parser.add_argument("--prompt_column", default="prompt", help="column of the data set, texts or messages")
    parser.add_argument("--output", required=True, type=Path, help="folder for the drafter")
    parser.add_argument("--tokens", type=int, default=80_000, help="tokens of answers to sample and learn from")
    parser.add_argument("--epochs", type=float, default=6.0, help="passes over them")
    parser.add_argument("--max_seconds", type=float, default=float("inf"), help="training time at most")
    parser.add_argument("--draft_vocab_size", type=int, help="reduced vocabulary; default: the whole one")
    parser.add_argument("--unroll_steps", type=int, default=5, help="draft steps to train")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_tokens_per_step", type=int, default=256)
    parser.add_argument("--max_num_seqs", type=int, default=64, help="requests sampled at once")
    parser.set_defaults(run=run_warmup)


def run_warmup(args: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    from .warmup import warm_up

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.prompts is not None:
        prompts = read_prompts(args.prompts, tokenizer)
    else:
        prompts = read_dataset_prompts(args.dataset, args.dataset_split, args.prompt_column, tokenizer)
    metrics = warm_up(
        args.model,
        prompts,
        args.output,
        num_tokens=args.tokens,
        max_completion_length=args.max_completion_length,
        max_num_seqs=args.max_num_seqs,
        draft_vocab_size=args.draft_vocab_size,
        always_drafted=[tokenizer.eos_token_id],
        epochs=args.epochs,
        max_seconds=args.max_seconds,
        learning_rate=args.learning_rate,
        unroll_steps=args.unroll_steps,
        max_tokens_per_step=args.max_tokens_per_step,
        temperature=args.temperature,
        seed=args.seed,
    )
    print(json.dumps({"output": str(args.output), **{name: round(value, 4) for name, value in metrics.items()}}))
    return 0


# ---- bench --------------------------------------------------------------------------------------------------------


def _add_bench(commands) -> None:
    bench = commands.add_parser("bench", help="measure")
    what = bench.add_subparsers(dest="what", required=True)
    parser = what.add_parser("rollout", help="a speculating engine against a plain one, by turns in one process")
    _add_engine_options(parser)
    parser.add_argument("--drafter", required=True, help="folder or Hub id of the drafter")
    parser.add_argument("--selector", default="auto", choices=["fixed", "beg_mab", "cost_model", "auto"])
    parser.add_argument("--draft_tokens", type=int, nargs="+", default=[1, 2, 3, 5], help="choices of the selector")
    parser.add_argument("--draft_sampling", default="greedy", choices=["greedy", "probabilistic"])
    parser.add_argument("--max_num_seqs", type=int, default=8, help="running requests at most")
    parser.add_argument("--num_prompts", type=int, default=32, help="samples per rollout")
    parser.add_argument("--rounds", type=int, default=3, help="rollouts of each engine that count")
    parser.add_argument("--stock_sampler", action="store_true", help="keep vLLM's sampler in the speculating engine")
    parser.add_argument("--output", type=Path, help="raw figures of every rollout (JSON)")
    parser.set_defaults(run=run_bench_rollout)

    parser = what.add_parser(
        "strategies", help="adaptive speculation against every fixed strategy and a plain engine, by turns"
    )
    parser.add_argument(
        "--cases",
        type=Path,
        default=Path("runs/bench_strategies/cases.json"),
        help="JSON list of {name, model, drafter, prompts, max_completion_length}; `make bench-strategies` makes the "
        "standard one in a clone",
    )
    parser.add_argument("--selector", default="auto", choices=["beg_mab", "cost_model", "auto"])
    parser.add_argument("--draft_tokens", type=int, nargs="+", default=[1, 2, 3, 5], help="of the drafter")
    parser.add_argument("--ngram_draft_tokens", type=int, nargs="*", default=[4], help="of the lookup in earlier text")
    parser.add_argument("--max_num_seqs", type=int, default=8, help="running requests at most")
    parser.add_argument("--rounds", type=int, default=5, help="rollouts of each engine that count")
    parser.add_argument("--warmup_rounds", type=int, default=2, help="rollouts before them that do not")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON in place of tables")
    parser.add_argument("--output", type=Path, help="raw figures of every rollout (JSON)")
    parser.set_defaults(run=run_bench_strategies)


def run_bench_strategies(args: argparse.Namespace) -> int:
    from .bench import format_table

    if not args.cases.exists():
        sys.exit(
            f"{args.cases} does not exist. In a clone `make bench-strategies` makes the standard cases and runs this "
            "command; for models of your own write a JSON list of "
            '{"name": ..., "model": ..., "drafter": ..., "prompts": "prompts.jsonl", "max_completion_length": 256} '
            "and name it with --cases."
        )
    tables, raw = [], []
    for case in json.loads(args.cases.read_text()):
        table, rollouts = _bench_strategies(case, args)
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


def _bench_strategies(case: dict, args: argparse.Namespace) -> tuple[dict, dict]:
    from transformers import AutoTokenizer

    from ..generation.engine import RolloutEngine
    from ..generation.rollout_loop import RolloutLoop
    from ..strategy import Strategy, make_selector
    from .bench import compare_rollouts, strategy_table

    prompts = read_prompts(Path(case["prompts"]), AutoTokenizer.from_pretrained(case["model"]))
    longest = max([*args.draft_tokens, *args.ngram_draft_tokens])
    plain, speculative = _engine_pair(
        case["model"], case["drafter"], prompts, case["max_completion_length"], args, max_draft_tokens=longest
    )
    engine = RolloutEngine(speculative)
    strategies = [Strategy("eagle3", number) for number in args.draft_tokens]
    strategies += [Strategy("ngram", number) for number in args.ngram_draft_tokens]
    adaptive = make_selector(args.selector, strategies, args.max_num_seqs, seed=args.seed)
    selectors = {"off": make_selector("fixed", strategies[:1], args.max_num_seqs, activation_threshold=0)}
    selectors |= {str(strategy): make_selector("fixed", [strategy], args.max_num_seqs) for strategy in strategies}
    selectors["adaptive"] = adaptive

    sampling = {"temperature": args.temperature, "max_tokens": case["max_completion_length"]}
    competitors = {"plain": _competitor(plain, None, **sampling)}
    for name, selector in selectors.items():
        competitors[name] = _competitor(speculative, RolloutLoop(engine, selector), **sampling)
    results = compare_rollouts(
        competitors, prompts, rounds=args.rounds, warmup_rounds=args.warmup_rounds, seed=args.seed
    )
    return strategy_table(results, "plain", "adaptive"), {"rollouts": _raw(results), "selector": adaptive.summary()}


def run_bench_rollout(args: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    from ..generation.engine import RolloutEngine
    from ..generation.rollout_loop import RolloutLoop
    from ..strategy import Strategy, make_selector
    from .bench import compare_rollouts, speedup

    prompts = read_prompts(args.prompts, AutoTokenizer.from_pretrained(args.model))
    prompts = [prompts[i % len(prompts)] for i in range(args.num_prompts)]
    plain, speculative = _engine_pair(
        args.model,
        args.drafter,
        prompts,
        args.max_completion_length,
        args,
        max_draft_tokens=max(args.draft_tokens),
        draft_sampling=args.draft_sampling,
    )
    strategies = [Strategy("eagle3", number, args.draft_sampling) for number in args.draft_tokens]
    selector = make_selector(args.selector, strategies, args.max_num_seqs, seed=args.seed)
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
        "steps_by_strategy": loop.ledger.steps_by_strategy(),
    }
    for name, rollouts in results.items():
        summary[f"{name}_tokens_per_s"] = round(statistics.median(r.tokens_per_s for r in rollouts), 1)
        summary[f"{name}_mean_length"] = round(statistics.mean(n for r in rollouts for n in r.lengths), 1)
    if args.output is not None:
        raw = {"summary": summary, "rollouts": _raw(results), "selector": selector.summary()}
        args.output.write_text(json.dumps(raw))
    print(json.dumps(summary))
    return 0


def _engine_pair(model: str, drafter: str, prompts, max_completion_length: int, args, **speculative_kwargs):
    """A plain engine and one with a drafter, in this process and with room for the same requests."""
    from ..generation.standalone import build_llm

    shape = {
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": max(map(len, prompts)) + max_completion_length,
        "seed": args.seed,
    }
    return build_llm(model, **shape), build_llm(model, drafter=drafter, **speculative_kwargs, **shape)


def _competitor(llm, loop, **sampling):
    """What [`~tlt_trl.bench.compare_rollouts`] times: an engine, stepped by a loop if there is one."""
    import torch

    from ..generation.standalone import completion_ids

    def generate(prompts: Sequence[list[int]], seed: int) -> list[list[int]]:
        torch.manual_seed(seed)  # the engines live in this process and sample from its random state
        llm.rollout_loop = loop
        return completion_ids(llm, prompts, logprobs=0, **sampling)

    return generate


def _raw(results) -> dict[str, list[dict]]:
    return {name: [{"seconds": r.seconds, "lengths": r.lengths} for r in rows] for name, rows in results.items()}


# ---- doctor -------------------------------------------------------------------------------------------------------


def _add_doctor(commands) -> None:
    parser = commands.add_parser("doctor", help="is this machine's engine exact under speculation?")
    parser.add_argument("--model", required=True, help="folder or Hub id of the policy")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter; default: made from the policy")
    parser.add_argument("--dtype", default="auto", help="dtype of the engine")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run_doctor_command)


def run_doctor_command(args: argparse.Namespace) -> int:
    from .doctor import run_doctor

    return run_doctor(args.model, args.drafter, as_json=args.json, dtype=args.dtype)


# ---- timeline -----------------------------------------------------------------------------------------------------


def _add_timeline(commands) -> None:
    parser = commands.add_parser("timeline", help="draw what every rank did when (a run with `log_timeline=True`)")
    parser.add_argument("folder", type=Path, help="<output_dir>/timeline")
    parser.add_argument("--output", type=Path, help="picture to write; default: print seconds by kind only")
    parser.add_argument("--first_s", type=float, default=0.0, help="second to begin at")
    parser.add_argument("--last_s", type=float, help="second to end at")
    parser.set_defaults(run=run_timeline)


def run_timeline(args: argparse.Namespace) -> int:
    from ..telemetry.timeline import draw_timelines, read_timelines, seconds_by_name

    try:
        timelines = read_timelines(args.folder)
        if args.output is not None:
            draw_timelines(timelines, args.output, args.first_s, args.last_s)
    except (FileNotFoundError, RuntimeError) as error:
        print(f"tlt-trl timeline: {error}", file=sys.stderr)
        return 1
    for timeline in timelines:
        seconds = {name: round(value, 3) for name, value in seconds_by_name(timeline).items()}
        print(json.dumps({"rank": timeline.rank, "zero_error_s": timeline.zero_error_s, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
