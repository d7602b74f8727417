"""Command line: `tlt-trl warmup`, `tlt-trl bench`, `tlt-trl doctor` and `tlt-trl timeline`."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..strategy.strategy import Strategy


DRAFTER_STRATEGIES = [Strategy("eagle3", length) for length in (1, 2, 3, 5)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tlt-trl", description="Tools around speculative rollouts for TRL.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_warmup(commands)
    bench = commands.add_parser("bench", help="measure").add_subparsers(dest="what", required=True)
    _add_bench_rollout(bench)
    _add_bench_strategies(bench)
    _add_bench_step(bench)
    _add_doctor(commands)
    _add_timeline(commands)
    args = parser.parse_args(argv)
    # vLLM logs every detail of its start-up; an answer to a command should not drown in it.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.basicConfig(level=logging.WARNING)
    return args.run(args)


# Each command imports its tool when it runs: torch and transformers take seconds, which `tlt-trl --help` does not wait
# for.
def _run_warmup(args: argparse.Namespace) -> int:
    from . import warmup

    return warmup.run(args)


def _run_bench_rollout(args: argparse.Namespace) -> int:
    from . import bench

    return bench.run_rollout(args)


def _run_bench_strategies(args: argparse.Namespace) -> int:
    from . import bench

    return bench.run_strategies(args)


def _run_bench_step(args: argparse.Namespace) -> int:
    from . import bench_step

    return bench_step.run_step(args)


def _run_doctor(args: argparse.Namespace) -> int:
    from . import doctor

    return doctor.run_doctor(args.model, args.drafter, as_json=args.json, dtype=args.dtype)


def _run_timeline(args: argparse.Namespace) -> int:
    from . import timeline

    return timeline.run(args)


def _strategy(text: str) -> Strategy:
    try:
        return Strategy.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object.")
    return value


def _add_prompt_format(parser: argparse.ArgumentParser) -> None:
    """What the run adds to its prompts; without it the drafter would learn from other ones."""
    parser.add_argument("--system_prompt", help="system message before every prompt, as the run's data set has it")
    parser.add_argument(
        "--tools", help="the trainer's `tools`: FILE.py:NAME, a list in a Python file, or FILE.json with JSON schemas"
    )
    parser.add_argument(
        "--chat_template_kwargs", type=_json_object, default={}, help="as in the trainer's arguments, in JSON"
    )


def _add_policy_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or Hub id of the policy")
    parser.add_argument("--max_completion_length", type=int, default=256, help="tokens per answer at most")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)


def _add_strategies(parser: argparse.ArgumentParser, default: list[Strategy]) -> None:
    names = " ".join(f"'{strategy}'" for strategy in default)
    parser.add_argument(
        "--strategies", type=_strategy, nargs="+", default=default, help=f"choices of the selector; default: {names}"
    )


def _add_warmup(commands) -> None:
    parser = commands.add_parser("warmup", help="make a first drafter from a policy's own answers")
    _add_policy_options(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompts", type=Path, help="JSONL, one prompt a line under the key 'prompt'")
    prompts.add_argument("--dataset", help="Hub id, folder or file that `datasets.load_dataset` takes")
    parser.add_argument("--dataset_split", default="train")
    parser.add_argument("--prompt_column", default="prompt", help="column of the data set, texts or messages")
    _add_prompt_format(parser)
    parser.add_argument("--output", required=True, type=Path, help="folder for the drafter")
    parser.add_argument("--tokens", type=int, default=80_000, help="tokens of answers to sample and learn from")
    parser.add_argument("--epochs", type=float, default=6.0, help="passes over them")
    parser.add_argument("--max_s", type=float, default=float("inf"), help="training time at most, in seconds")
    parser.add_argument(
        "--draft_vocab_size",
        type=int,
        help="tokens that can be drafted; default: a quarter of all",
    )
    parser.add_argument("--unroll_steps", type=int, default=5, help="draft steps to train")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_tokens_per_step", type=int, default=256)
    parser.add_argument("--max_num_seqs", type=int, default=64, help="requests sampled at once")
    parser.set_defaults(run=_run_warmup)


def _add_bench_rollout(commands) -> None:
    parser = commands.add_parser(
        "rollout", help="a speculating engine against a plain one, alternating in one process"
    )
    _add_policy_options(parser)
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL, one prompt a line under the key 'prompt'")
    _add_prompt_format(parser)
    parser.add_argument("--drafter", required=True, help="folder or Hub id of the drafter")
    parser.add_argument("--selector", default="auto", choices=["fixed", "beg_mab", "cost_model", "auto"])
    _add_strategies(parser, DRAFTER_STRATEGIES)
    parser.add_argument("--max_num_seqs", type=int, default=8, help="running requests at most")
    parser.add_argument("--num_prompts", type=int, default=32, help="samples per rollout")
    parser.add_argument("--rounds", type=int, default=3, help="rollouts of each engine that count")
    parser.add_argument("--stock_sampler", action="store_true", help="keep vLLM's sampler in the speculating engine")
    parser.add_argument("--output", type=Path, help="raw figures of every rollout (JSON)")
    parser.set_defaults(run=_run_bench_rollout)


def _add_bench_strategies(commands) -> None:
    parser = commands.add_parser(
        "strategies", help="adaptive speculation against every fixed strategy and a plain engine, alternating"
    )
    parser.add_argument(
        "--cases",
        type=Path,
        default=Path("runs/bench_strategies/cases.json"),
        help="JSON list of {name, model, drafter, prompts, max_completion_length}; `make bench-strategies` makes the "
        "standard one in a clone",
    )
    parser.add_argument("--selector", default="auto", choices=["beg_mab", "cost_model", "auto"])
    _add_strategies(parser, [*DRAFTER_STRATEGIES, Strategy("ngram", 4)])
    parser.add_argument("--max_num_seqs", type=int, default=8, help="running requests at most")
    parser.add_argument("--rounds", type=int, default=5, help="rollouts of each engine that count")
    parser.add_argument("--warmup_rounds", type=int, default=2, help="rollouts before them that do not")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--output", type=Path, help="raw figures of every rollout (JSON)")
    parser.set_defaults(run=_run_bench_strategies)


def _add_bench_step(commands) -> None:
    parser = commands.add_parser(
        "step", help="whole training steps against TRL's GRPOTrainer with its own engine, alternating"
    )
    parser.add_argument(
        "--cases",
        type=Path,
        default=Path("runs/bench_step/cases.json"),
        help="JSON list of workloads; `python benchmarks/step.py` makes the standard ones in a clone",
    )
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="those to measure; default: all of the file")
    parser.add_argument("--rounds", type=int, help="rounds that count; default: the workload's own")
    parser.add_argument("--warmup_rounds", type=int, help="rounds before them; default: the workload's own")
    parser.add_argument(
        "--max_noise",
        type=float,
        default=0.1,
        help="change of plain training from one step to the next above which nothing is concluded; default: 0.1",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--output", type=Path, help="raw figures of every step (JSON)")
    parser.set_defaults(run=_run_bench_step)


def _add_doctor(commands) -> None:
    parser = commands.add_parser("doctor", help="is this machine's engine exact under speculation?")
    parser.add_argument("--model", required=True, help="folder or Hub id of the policy")
    parser.add_argument("--drafter", help="folder or Hub id of a drafter; default: made from the policy")
    parser.add_argument("--dtype", default="auto", help="dtype of the engine")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=_run_doctor)


def _add_timeline(commands) -> None:
    parser = commands.add_parser("timeline", help="draw what every rank did when (a run with `log_timeline=True`)")
    parser.add_argument("folder", type=Path, help="<output_dir>/timeline")
    parser.add_argument("--output", type=Path, help="picture to write; default: print seconds by kind only")
    parser.add_argument("--first_s", type=float, default=0.0, help="second to begin at")
    parser.add_argument("--last_s", type=float, help="second to end at")
    parser.set_defaults(run=_run_timeline)


if __name__ == "__main__":
    sys.exit(main())
