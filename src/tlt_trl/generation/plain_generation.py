"""TRL's generation for runs that cannot speculate, and the choice between it and the speculative one."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from trl.generation.vllm_generation import VLLMGeneration

from ..drafter.modeling_drafter import Drafter
from ..upstream import replaced_llm
from ..vllm_internals.parts import EngineParts
from ..vllm_internals.weights import EngineWeights
from .policy_checks import check_model_class, why_unsupported
from .speculative_generation import SpeculativeVLLMGeneration


if TYPE_CHECKING:
    from ..tlt_grpo_config import TLTGRPOConfig


logger = logging.getLogger(__name__)

INACTIVE = (
    "Speculative rollouts and drafter training are inactive: they need `use_vllm=True` and `vllm_mode='colocate'`. "
    "This run is TRL's GRPOTrainer."
)


class PlainVLLMGeneration(VLLMGeneration):
    """
    [`~trl.generation.vllm_generation.VLLMGeneration`] with `vllm_engine_kwargs`, and a weight sync that works on CPU.

    Args:
        args ([`TLTGRPOConfig`]):
            Configuration of the trainer.
        **kwargs:
            Arguments of [`~trl.generation.vllm_generation.VLLMGeneration`].
    """

    def __init__(self, *, args: "TLTGRPOConfig", **kwargs: Any):
        self._engine_kwargs = cast(dict, args.vllm_engine_kwargs or {})  # a command line's text is a dict by now
        super().__init__(**kwargs)

    def _init_vllm(self):
        with replaced_llm(lambda llm_class, **trl_kwargs: llm_class(**(trl_kwargs | self._engine_kwargs))):
            super()._init_vllm()

    def sync_weights(self):
        """Pushes the policy to the engine; on sharded back ends every rank must call it."""
        if self.accelerator.device.type != "cpu":
            return super().sync_weights()
        # The CPU backend packs weights and drops their loaders, which TRL 1.16 calls.
        with torch.no_grad():
            EngineWeights(EngineParts.of(self.llm)).push_policy(self._iter_named_params(), verify=False)
        self.llm.reset_prefix_cache()


def build_generation(
    *,
    args: "TLTGRPOConfig",
    drafter: Drafter | None,
    train_dataset: Iterable[dict[str, Any]] | None,
    **kwargs: Any,
) -> VLLMGeneration:
    """
    Speculative generation, or TRL's where the run cannot speculate and stay exact.

    Args:
        args ([`TLTGRPOConfig`]):
            Configuration of the trainer.
        drafter ([`Drafter`], *optional*), train_dataset (`Iterable[dict]`, *optional*):
            See [`SpeculativeVLLMGeneration`].
        **kwargs:
            Arguments of [`~trl.generation.vllm_generation.VLLMGeneration`].

    Raises:
        `ValueError`: If the run cannot speculate and `speculation_on_unsupported="error"`.
    """
    check_model_class({"model_impl": args.vllm_model_impl} | cast(dict, args.vllm_engine_kwargs or {}))
    reason = why_unsupported(args, kwargs["model"])
    if reason is None:
        return SpeculativeVLLMGeneration(args=args, drafter=drafter, train_dataset=train_dataset, **kwargs)
    if args.speculation_on_unsupported == "error":
        raise ValueError(f"This run cannot speculate. {reason}")
    if kwargs["accelerator"].is_main_process:
        logger.warning("This run goes on without speculation and without a drafter, as TRL's GRPOTrainer. %s", reason)
    return PlainVLLMGeneration(args=args, **kwargs)


def speculates(generation: VLLMGeneration) -> bool:
    """Whether that generation uses a drafter: it was built with one, and its engine has passed the check."""
    return isinstance(generation, SpeculativeVLLMGeneration) and generation.is_exact
