"""
`tlt-trl bench step`: whole training steps of TRL's `GRPOTrainer` and of ours, alternately on one machine.

Each trainer has a process of its own, since what one of them does to vLLM (repairs, the model runner, the sampler)
must not reach the other; only one of the two works at any time.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from typing import Any

from tqdm.auto import tqdm

from .step_summary import PLAIN, SPECULATIVE, TimedStep, Workload, format_summary, summarise


class TrainerProcess:
    """
    A trainer in a process of its own, ready for its first step.

    Args:
        name (`str`):
            `"plain"` or `"speculative"`.
        workload ([`~tlt_trl.tools.step_summary.Workload`]):
            What it trains.
        seed (`int`):
            Of the training arguments.

    Attributes:
        startup_s (`float`):
            Seconds that building the trainer took.
    """

    def __init__(self, name: str, workload: Workload, seed: int):
        self._name = name
        # A forked process would inherit threads and devices.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run_trainer, args=(name, workload, seed, theirs), name=name)
        self._process.start()
        theirs.close()  # or nobody would notice that the process has ended
        self._steps: list[dict[str, Any]] = []
        self.startup_s: float = self._receive()

    def step(self) -> None:
        """Takes one step."""
        self._connection.send("step")
        self._steps.append(self._receive())

    def finish(self) -> list[TimedStep]:
        """Ends the training; returns its steps."""
        self._connection.send("finish")
        logs = self._receive()
        self._process.join()
        return [TimedStep(**step, logs=of_step) for step, of_step in zip(self._steps, logs, strict=True)]

    def terminate(self) -> None:
        """Ends the process, also in the middle of a step."""
        self._process.terminate()
        self._process.join()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"The {self._name} trainer has ended with exit status {self._process.exitcode}; see above."
            ) from None


def _run_trainer(name: str, workload: Workload, seed: int, connection: Connection) -> None:
    """What runs in the process of a trainer."""
    if name == PLAIN:
        os.environ["VLLM_PLUGINS"] = ""  # ours, which vLLM would load into every engine of this environment
    from ..generation.standalone import leave_launcher
    from .step_trainer import take_turns

    leave_launcher()  # or the trainer would wait for the other processes of a pod
    take_turns(name, workload, seed, connection)


def measure(workload: Workload, seed: int = 0) -> tuple[dict[str, list[TimedStep]], dict[str, float]]:
    """
    Takes steps alternately; who comes first in a round alternates too.

    Args:
        workload ([`~tlt_trl.tools.step_summary.Workload`]):
            What to train.
        seed (`int`, *optional*, defaults to `0`):
            Of both trainers.

    Returns:
        `tuple[dict[str, list[TimedStep]], dict[str, float]]`: All steps of each trainer, and the seconds that building
        it took.
    """
    with _processes(workload, seed) as trainers:
        names = list(trainers)
        for number in tqdm(range(workload.warmup_rounds + workload.rounds), desc=workload.name, unit="round"):
            for name in names if number % 2 == 0 else reversed(names):
                trainers[name].step()
        steps = {name: trainer.finish() for name, trainer in trainers.items()}
        return steps, {name: trainer.startup_s for name, trainer in trainers.items()}


@contextmanager
def _processes(workload: Workload, seed: int) -> Iterator[dict[str, TrainerProcess]]:
    """Both trainers, one built after the other."""
    trainers: dict[str, TrainerProcess] = {}
    try:
        for name in (PLAIN, SPECULATIVE):
            trainers[name] = TrainerProcess(name, workload, seed)
        yield trainers
    finally:
        for trainer in trainers.values():
            trainer.terminate()


def read_workloads(args: argparse.Namespace) -> list[Workload]:
    """The chosen workloads of the file, with the numbers of rounds of the command line."""
    if not args.cases.exists():
        sys.exit(
            f"{args.cases} does not exist. In a clone `python benchmarks/step.py` prepares the standard workloads; "
            "for one of your own write a JSON list of objects with the fields of "
            "`tlt_trl.tools.step_summary.Workload` and name it with --cases."
        )
    workloads = [Workload(**case) for case in json.loads(args.cases.read_text())]
    names = [workload.name for workload in workloads]
    chosen = args.workloads or names
    if unknown := set(chosen) - set(names):
        sys.exit(f"{args.cases} has no workload {', '.join(sorted(unknown))}, only {', '.join(names)}.")
    changed = {name: getattr(args, name) for name in ("rounds", "warmup_rounds") if getattr(args, name) is not None}
    chosen_workloads = [replace(workload, **changed) for workload in workloads if workload.name in chosen]
    if too_short := [workload.name for workload in chosen_workloads if workload.rounds < 2]:
        sys.exit(f"{', '.join(too_short)}: at least 2 rounds are needed to see the noise, and 5 for a conclusion.")
    return chosen_workloads


def run_step(args: argparse.Namespace) -> int:
    """`tlt-trl bench step`."""
    summaries, raw = [], []
    for workload in read_workloads(args):
        steps, startup_s = measure(workload, args.seed)
        summary = summarise(steps, workload.warmup_rounds, args.max_noise, startup_s)
        summaries.append({"workload": workload.name, **summary})
        raw.append({"workload": asdict(workload), "summary": summary, "steps": _raw(steps)})
        if args.output is not None:  # after each, for they take long
            args.output.write_text(json.dumps({"seed": args.seed, "workloads": raw}) + "\n")
        if not args.json:
            print(f"\n## {workload.name}\n\n{format_summary(summary)}\n", flush=True)
    if args.json:
        print(json.dumps({"workloads": summaries}))
    return 0


def _raw(steps: dict[str, list[TimedStep]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [asdict(step) for step in rows] for name, rows in steps.items()}
