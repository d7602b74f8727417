"""A policy that holds NaN or infinity: found before adapters are merged, and reported with the step."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import is_peft_model
from torch.distributed.tensor import DTensor
from transformers import TrainerState

from ..vllm_internals.weights import NonFinitePolicyError


def check_adapters(policy: torch.nn.Module) -> None:
    """
    Raises a [`NonFinitePolicyError`] for a broken adapter, which merging would spread into the base model for good.

    Sharded weights are left to the check of what is pushed, which all ranks see alike.
    """
    if not is_peft_model(policy):
        return
    for name, parameter in policy.named_parameters():
        if policy.prefix not in name or isinstance(parameter, DTensor) or not parameter.numel():
            continue
        if not torch.linalg.vector_norm(parameter.detach(), float("inf")).isfinite():
            raise NonFinitePolicyError(
                f"The adapter's weight {name} holds NaN or infinity; base model and engine were not changed."
            )


@contextmanager
def naming_the_step(state: TrainerState) -> Iterator[None]:
    """Adds to a [`NonFinitePolicyError`] from inside the context when the policy broke, and where to look."""
    try:
        yield
    except NonFinitePolicyError as error:
        raise NonFinitePolicyError(f"{error} {_where_to_look(state)}") from error


def _where_to_look(state: TrainerState) -> str:
    step = state.global_step
    if not step:
        return (
            "No optimiser step was made before (global step 0): the policy was loaded like this, or changed by a "
            "callback. Check the files of the checkpoint."
        )
    broken = [log["step"] for log in state.log_history if not _is_finite(log)]
    seen = (
        f"The first log with a `loss` or `grad_norm` that is not finite is that of step {broken[0]}: look at the "
        "rewards of that step for NaN, and"
        if broken
        else "Every `loss` and `grad_norm` logged so far is finite, so a callback may have changed the weights; else"
    )
    return (
        f"This was found at global step {step}, in the rollout after that many optimiser steps. {seen} lower "
        "`learning_rate` or `max_grad_norm`, or resume from an earlier checkpoint."
    )


def _is_finite(log: dict[str, float]) -> bool:
    return all(math.isfinite(log.get(name, 0.0)) for name in ("loss", "grad_norm"))
