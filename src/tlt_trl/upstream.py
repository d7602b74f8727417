"""
Every name of TRL, transformers, accelerate and torch that this package replaces, and the private ones that it reads,
one function each.

Each says why there is no other way in and until which version it is needed. Nothing is replaced for longer than it has
to be: what is not a context manager is undone by nobody because it only adds what is missing.
`tests/test_upstream_contract.py` checks that every name is still there.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedTokenizerBase
from transformers import trainer as transformers_trainer
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer


@contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def replaced_vllm_generation(factory: Callable[..., Any]):
    """
    Lets `GRPOTrainer.__init__` build another generation class, inside the context.

    It takes `VLLMGeneration` from its module's globals and offers no hook (TRL 1.16).
    """
    return _replaced(grpo_trainer, "VLLMGeneration", factory)


@contextmanager
def replaced_llm(build: Callable[..., Any]) -> Iterator[None]:
    """
    Lets `VLLMGeneration._init_vllm` call `build(llm_class, **kwargs)` where it calls `LLM(**kwargs)`.

    TRL builds the engine with a fixed keyword list and no hook for more (TRL 1.16;
    https://github.com/huggingface/trl/pull/5605 covers server mode only).
    """
    llm_class = vllm_generation.LLM
    with _replaced(vllm_generation, "LLM", lambda **kwargs: build(llm_class, **kwargs)):
        yield


@contextmanager
def before_first_gather(accelerator: Any, action: Callable[[], None]) -> Iterator[None]:
    """
    Runs `action` before the first `accelerator.gather` inside the context.

    That gather is where ranks wait for the last one to finish its rollout. It sits inside `GRPOTrainer._generate`,
    after tools, environments and `rollout_func`, so wrapping it covers all of them; code around `_generate` would come
    too late (TRL 1.16).
    """
    gather = accelerator.gather

    def act_and_gather(tensor):
        accelerator.gather = gather
        action()
        return gather(tensor)

    with _replaced(accelerator, "gather", act_and_gather):
        yield


@contextmanager
def timed_generation(
    generation: vllm_generation.VLLMGeneration,
    on_rollout: Callable[[float, list[list[int]], list[list[int]]], None],
    on_sync: Callable[[float], None],
) -> Iterator[None]:
    """
    Calls `on_rollout(seconds, prompts, completions)` after every `generate` and `on_sync(seconds)` after every
    `sync_weights` inside the context.

    TRL sends the times of both to wandb and mlflow only (TRL 1.16).
    """
    generate, sync_weights = generation.generate, generation.sync_weights

    def timed_generate(*args, **kwargs):
        began_s = time.perf_counter()
        output = generate(*args, **kwargs)
        on_rollout(time.perf_counter() - began_s, output[0], output[1])
        return output

    def timed_sync_weights():
        began_s = time.perf_counter()
        sync_weights()
        on_sync(time.perf_counter() - began_s)

    with _replaced(generation, "generate", timed_generate), _replaced(generation, "sync_weights", timed_sync_weights):
        yield


def undo_preparation_for_evaluation(model: torch.nn.Module) -> None:
    """
    Lets `Trainer.train` wrap a policy in DDP that an earlier evaluation has prepared without it.

    `Trainer.evaluate` prepares the bare model and accelerate marks it as prepared; training then never wraps it, and
    every rank trains a policy of its own (transformers 5.17, accelerate 1.15). Not for sharded back ends, which
    prepare a model for both in the same way.
    """
    if vars(model).pop("_is_accelerate_prepared", False) and "_original_forward" in vars(model):
        # There must not be a second autocast around the first. `unwrap_model` would also take off TRL's patch.
        model.forward = vars(model).pop("_original_forward")


@contextmanager
def without_rotation_and_push(trainer: Any) -> Iterator[None]:
    """
    Keeps `Trainer._save_checkpoint` from deleting older checkpoints and from pushing the new one.

    Both must wait until the drafter's part of the checkpoint is written, and transformers 5.17 offers no hook.
    """
    trainer._push_from_checkpoint = lambda folder: None
    try:
        with _replaced(transformers_trainer, "rotate_checkpoints", lambda **kwargs: None):
            yield
    finally:
        del trainer._push_from_checkpoint


@contextmanager
def uploads_through(upload: Callable[..., Any]) -> Iterator[None]:
    """
    Lets a trainer's pushes call `upload(upload_folder, **kwargs)` where they call `HfApi.upload_folder(**kwargs)`.

    `Trainer._push_from_checkpoint` pushes all files of a checkpoint, and `push_to_hub` those of the output folder,
    without a way to leave some out (transformers 5.17).
    """
    api = transformers_trainer.hf_api()
    ours = SimpleNamespace(create_repo=api.create_repo, upload_folder=functools.partial(upload, api.upload_folder))
    with _replaced(transformers_trainer, "hf_api", lambda: ours):
        yield


def prompt_ids(
    prompts: list,
    processing_class: PreTrainedTokenizerBase,
    tools: Sequence[Callable[..., Any] | dict[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """
    Token ids of prompts, by the method with which `GRPOTrainer` makes them, for who has no trainer.

    A drafter is sensitive to the prompt, so there must be no second way to make one. TRL offers none outside its
    trainer, which replaces the chat template when there are tools in `__init__` (TRL 1.16).
    """
    replaces_template = tools and not grpo_trainer.is_chat_template_prefix_preserving(processing_class)
    trainer = SimpleNamespace(
        _is_vlm=False,
        environment_factories=None,
        processing_class=processing_class,
        tools=list(tools),
        chat_template=grpo_trainer.get_training_chat_template(processing_class) if replaces_template else None,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
    )
    return grpo_trainer.GRPOTrainer._tokenize_prompts(trainer, prompts)[0]


@contextmanager
def adapters_for_push(policy: Any, are_disabled: bool) -> Iterator[None]:
    """
    Corrects what `VLLMGeneration._iter_named_params` does to the adapters of a PEFT policy, inside the context.

    It merges them also while they are disabled, and takes them out again only when it was walked to its end (TRL 1.16,
    peft 0.21). A policy left merged, by an interrupt in a notebook for instance, would be trained with its adapters
    cut off.
    """
    if are_disabled:
        policy.merge_adapter = policy.unmerge_adapter = lambda: None
    try:
        yield
    except BaseException:
        if is_peft_model(policy):
            policy.unmerge_adapter()
        raise
    finally:
        if are_disabled:
            del policy.merge_adapter, policy.unmerge_adapter


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; torch has no public name for the counter that autograd keeps."""
    return tensor._version


def allow_loading_to_numbered_cpu() -> None:
    """
    Teaches `torch.load` the location `"cpu:0"`.

    transformers 5.17 loads the policy's optimiser to `args.device`, which for several processes on CPU is `"cpu:0"`: a
    location that torch 2.13 can save to and does not know when it loads.
    """
    torch.serialization.register_package(
        priority=11,
        tagger=lambda storage: None,
        deserializer=lambda storage, location: storage if location.startswith("cpu:") else None,
    )


def default_store() -> torch.distributed.Store:
    """The key-value store of the running process group, which torch 2.13 hands out under a private name only."""
    return torch.distributed.distributed_c10d._get_default_store()
