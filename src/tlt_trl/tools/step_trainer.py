"""One of the two trainers of `tlt-trl bench step`, in a process of its own. It takes a step when it is its turn."""

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration

from .. import upstream
from ..vllm_internals.parts import EngineParts
from ..vllm_internals.weights import EngineWeights
from .step_summary import PLAIN, Workload


# Threads of OpenMP spin for 200 ms after their last work; the other trainer must not begin on the same cores.
SETTLE_S = 0.5


class Turns(TrainerCallback):
    """
    Lets the trainer go on for one step whenever it is told to, and reports each step.

    Args:
        connection (`~multiprocessing.connection.Connection`):
            To the process that tells.
    """

    def __init__(self, connection: Connection):
        self.pause: Callable[[], AbstractContextManager[None]] = nullcontext  # around the time of the other trainer
        self.logs: list[dict[str, float]] = []
        self._connection = connection
        self._begin()

    def _begin(self) -> None:
        self._step: dict[str, Any] = {"rollout_s": 0.0, "sync_s": 0.0, "prompt_lengths": [], "lengths": []}
        self._began_s = time.perf_counter()

    def note_rollout(self, seconds: float, prompts: list[list[int]], completions: list[list[int]]) -> None:
        self._step["rollout_s"] += seconds
        self._step["prompt_lengths"] += map(len, prompts)
        self._step["lengths"] += map(len, completions)

    def note_sync(self, seconds: float) -> None:
        self._step["sync_s"] += seconds

    def on_train_begin(self, args, state, control, **kwargs):
        self._wait_for_turn()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self._step["seconds"] = time.perf_counter() - self._began_s
        with self.pause():
            time.sleep(SETTLE_S)
            self._connection.send(self._step)
            # Also after the last step: what a run saves at its end falls into nobody's step.
            self._wait_for_turn()

    def on_log(self, args, state, control, logs, **kwargs):
        if "reward" in logs:  # not the summary of the run
            self.logs.append({name: float(value) for name, value in logs.items()})

    def _wait_for_turn(self) -> None:
        self._connection.recv()
        self._begin()


def take_turns(name: str, workload: Workload, seed: int, connection: Connection) -> None:
    """
    Builds the trainer, then trains for as many steps as the workload has rounds, one a turn.

    Sends the seconds that building took, a dictionary after every step, and the logs of all steps at the end; waits
    for a message before each step and before the end.
    """
    turns = Turns(connection)
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        trainer = make_trainer(name, workload, folder, seed, turns)
        with upstream.timed_generation(trainer.vllm_generation, turns.note_rollout, turns.note_sync):
            connection.send(time.perf_counter() - began_s)
            trainer.train()
    connection.send(turns.logs)


def make_trainer(name: str, workload: Workload, folder: str, seed: int, turns: Turns) -> GRPOTrainer:
    """TRL's trainer or ours, otherwise the same."""
    config = workload.config | {
        "output_dir": folder,
        "seed": seed,
        "max_steps": workload.warmup_rounds + workload.rounds,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
    }
    rows = Path(workload.dataset).read_text().splitlines()
    arguments = {
        "model": workload.model,
        "reward_funcs": load_function(workload.reward),
        "train_dataset": Dataset.from_list([json.loads(row) for row in rows]),
        "processing_class": AutoTokenizer.from_pretrained(workload.model),
        "callbacks": [turns],
        "peft_config": None if workload.lora is None else LoraConfig(**workload.lora),
    }
    if name == PLAIN:
        trainer = make_plain_trainer(GRPOConfig(**config), workload.engine, arguments)
    else:
        # Not imported for the plain trainer, whose process stays as TRL makes it.
        from ..tlt_grpo_config import TLTGRPOConfig
        from ..tlt_grpo_trainer import TLTGRPOTrainer

        args = TLTGRPOConfig(**config, vllm_engine_kwargs=workload.engine or None, **workload.tlt)
        trainer = TLTGRPOTrainer(args=args, **arguments)
        turns.pause = trainer.online_drafter.evaluating  # the other trainer's time earns the drafter none
    if trainer.args.steps_per_generation * trainer.num_iterations != trainer.args.gradient_accumulation_steps:
        raise ValueError(
            f"Workload {workload.name}: every step must have one rollout, so leave out `steps_per_generation`, "
            "`generation_batch_size` and `num_iterations`."
        )
    trainer.remove_callback(PrinterCallback)  # a dictionary of 80 keys a step
    return trainer


def make_plain_trainer(args: GRPOConfig, engine: dict[str, Any], arguments: dict[str, Any]) -> GRPOTrainer:
    """TRL's trainer with its own engine, which it has no arguments for."""
    from vllm.platforms import current_platform

    generation = VLLMGenerationOnCPU if current_platform.is_cpu() else VLLMGeneration
    with (
        upstream.replaced_vllm_generation(generation),
        upstream.replaced_llm(lambda llm_class, **kwargs: llm_class(**kwargs | engine)),
    ):
        return GRPOTrainer(args=args, **arguments)


class VLLMGenerationOnCPU(VLLMGeneration):
    """
    TRL's generation with a weight sync that works on CPU.

    vLLM's CPU backend packs linear weights and drops their loaders, so that TRL's own sync ends in an `AttributeError`
    (TRL 1.16, vLLM 0.31). Nothing is read back, as in TRL.
    """

    def sync_weights(self):
        EngineWeights(EngineParts.of(self.llm)).push_policy(self._iter_named_params(), verify=False)
        self.llm.reset_prefix_cache()


def load_function(name: str) -> Callable[..., Any]:
    """
    A function of a file.

    Args:
        name (`str`):
            `"file.py:function"`.

    Raises:
        `ValueError`: If it has another form, or there is no such file.
    """
    path, _, function = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("tlt_trl_bench_reward", path)
    if not path.endswith(".py") or not Path(path).is_file() or spec is None or spec.loader is None:
        raise ValueError(f"The reward function {name!r} must be given as 'file.py:function', with a file that exists.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)[function]
