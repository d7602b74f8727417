"""Loading weights into a running engine, and reading them back."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .contract import UnsupportedEngineError
from .parts import EngineParts
from .read_back import (
    EngineTensors,
    Fingerprint,
    bits_checksum,
    compare_fingerprints,
    fingerprint_of_weight,
    noting_packed_weights,
)


logger = logging.getLogger(__name__)


class WeightMismatchError(RuntimeError):
    """The weights in the engine are not those that were pushed."""


class NonFinitePolicyError(FloatingPointError):
    """The policy that was to be pushed holds NaN or infinity."""


class EngineWeights:
    """
    The policy's and the drafter's weights inside an engine.

    Args:
        parts ([`EngineParts`]):
            The engine.

    Raises:
        [`UnsupportedEngineError`]: If the drafter shares the policy's `lm_head`.
    """

    def __init__(self, parts: EngineParts):
        self._parts = parts
        self._warned_of: set[str] = set()  # models of which tensors could not be compared
        if parts.proposer is not None and self.drafter.lm_head is self.policy.lm_head:
            raise UnsupportedEngineError(
                "The engine's drafter shares the policy's `lm_head`: pushing the drafter would overwrite the policy. "
                "Call `tlt_trl.vllm_internals.prepare.prepare_vllm()` before the engine is built."
            )

    @property
    def policy(self) -> torch.nn.Module:
        return self._parts.runner.get_model()

    @property
    def drafter(self) -> torch.nn.Module:
        return self._parts.proposer.model

    @property
    def policy_embedding(self) -> torch.Tensor:
        """The engine's own embedding of the policy, shape (padded vocab_size, hidden_size); the drafter shares it."""
        return self.policy.model.embed_tokens.weight

    @property
    def drafter_embedding(self) -> torch.Tensor:
        return self.drafter.model.embed_tokens.weight

    def push_policy(self, weights: Iterable[tuple[str, torch.Tensor]], verify: bool) -> None:
        """Loads the policy's weights, see [`RolloutEngine.push_policy`]."""
        from vllm.config import set_current_vllm_config

        fingerprints: dict[str, Fingerprint] = {}
        engine = EngineTensors(self.policy, _multiply, self._parts.tensor_parallel_rank)
        observed = self._observed(weights, engine, fingerprints) if verify else iter(weights)
        model = self._parts.runner.model
        with set_current_vllm_config(self._parts.config), torch.no_grad():
            if self._parts.is_cpu:
                # The CPU backend packs linear weights and drops their loaders; the layerwise reload rebuilds both.
                failing = finished_after_failure(self.policy, self._parts.config.model_config)
                with failing, noting_packed_weights() as engine.packed:
                    self._parts.runner.reload_weights(weights_iterator=observed)
                repack_tied_head(model)
            else:
                for name, tensor in observed:
                    model.load_weights([(name, tensor)])
        if verify:
            self._check_read_back("policy", engine, fingerprints)

    def _observed(
        self, weights: Iterable[tuple[str, torch.Tensor]], engine: EngineTensors, fingerprints: dict[str, Fingerprint]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as they come, leaving a fingerprint of each."""
        for name, tensor in weights:
            # Products with a broken weight differ from themselves: without this, the comparison below would blame the
            # engine.
            if not is_finite(tensor):
                raise NonFinitePolicyError(
                    f"The policy's weight {name} holds NaN or infinity; nothing is sampled from it."
                )
            own = engine.slice_of(name, tensor)
            fingerprints[name] = fingerprint_of_weight(own, engine.dtype(name) or self._parts.dtype)
            yield name, tensor
        # A tied head is not among the weights, but the engine may multiply by a copy of its own.
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if head not in fingerprints and embedding in fingerprints and engine.dtype(head) is not None:
            fingerprints[head] = fingerprints[embedding]

    def push_drafter(self, weights: Iterable[tuple[str, torch.Tensor]], verify: bool) -> None:
        """Loads the drafter's weights, see [`RolloutEngine.push_drafter`]."""
        weights = list(weights)
        if shared := [name for name, _ in weights if "embed_tokens" in name]:
            raise ValueError(f"The drafter shares the policy's embedding; refusing to load {shared} over it.")
        policy_embedding = bits_checksum(self.policy_embedding.data) if verify else None
        engine = EngineTensors(self.drafter, _multiply, self._parts.tensor_parallel_rank)
        self._load_drafter(weights, engine)
        if not verify:
            return
        if bits_checksum(self.policy_embedding.data) != policy_embedding:
            raise UnsupportedEngineError(
                "Loading the drafter changed the policy's embedding in the engine. Please report this with the vLLM "
                "version and the model's name."
            )
        check_mapping(self.drafter, dict(weights))
        self._check_read_back("drafter", engine, _fingerprints_of_drafter(weights, engine))

    def _load_drafter(self, weights: list[tuple[str, torch.Tensor]], engine: EngineTensors) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with set_current_vllm_config(self._parts.config), torch.no_grad():
            if self._parts.is_cpu:
                initialize_layerwise_reload(self.drafter)
                with noting_packed_weights() as engine.packed:
                    self.drafter.load_weights(weights)
                    finalize_layerwise_reload(self.drafter, self._parts.speculative_config.draft_model_config)
            else:
                self.drafter.load_weights(weights)

    def _check_read_back(self, what: str, engine: EngineTensors, pushed: dict[str, Fingerprint]) -> None:
        with torch.no_grad():
            differing, missing = compare_fingerprints(pushed, engine)
        if differing:
            raise WeightMismatchError(
                f"After the weight sync the engine's {what} differs from the one pushed in {len(differing)} tensors, "
                f"first {differing[0]}. Please report this with the vLLM version and the model's name."
            )
        if missing and what not in self._warned_of:
            self._warned_of.add(what)
            logger.warning(
                "%d of %d tensors of the %s cannot be read back from the engine, first %s: vLLM keeps them under "
                "other names or in another form. They are pushed all the same; a fault in them is not noticed.",
                len(missing),
                len(pushed),
                what,
                missing[0],
            )


def _fingerprints_of_drafter(weights: list[tuple[str, torch.Tensor]], engine: EngineTensors) -> dict[str, Fingerprint]:
    fingerprints = {}
    for name, tensor in weights:
        engine_name = name.replace("midlayer.", "layers.0.")
        if tensor.is_floating_point():  # `check_mapping` compares the mapping
            own = engine.slice_of(engine_name, tensor)
            fingerprints[engine_name] = fingerprint_of_weight(own, engine.dtype(engine_name) or tensor.dtype)
    return fingerprints


def is_finite(tensor: torch.Tensor) -> bool:
    """
    Whether no entry is NaN or infinite.

    The sum says so, for a 135M policy in 0.02 s on one core, where the largest magnitude takes 0.34 s; every entry is
    asked only if the sum overflows.
    """
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


@contextmanager
def finished_after_failure(model: torch.nn.Module, model_config: Any) -> Iterator[None]:
    """
    Finishes a layerwise reload that an exception ends: a policy with NaN, an interrupt in a notebook.

    Half of the layers would stay without weights and loaders, and the next push would fail with an `AttributeError`
    (vLLM 0.31). What was not loaded is put back, so the engine holds some of both until it is pushed to again.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    try:
        yield
    except BaseException:
        finalize_layerwise_reload(model, model_config)
        raise


def repack_tied_head(model: torch.nn.Module) -> None:
    """
    Packs a tied head anew from the embedding that was just loaded.

    vLLM's CPU backend multiplies by a packed copy of the head. The layerwise reload refreshes that copy only for
    layers whose own weights it loads; a tied head has none, so the engine would keep sampling with the head of the
    checkpoint while everything below it is new.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def check_mapping(drafter: torch.nn.Module, pushed: dict[str, torch.Tensor]) -> None:
    """An engine with another mapping drafts other tokens than the drafter meant: right text, acceptance near 1."""
    if "d2t" in pushed and not torch.equal(drafter.draft_id_to_target_id.cpu(), pushed["d2t"].cpu()):
        raise WeightMismatchError(
            "After the weight sync the engine's mapping of draft tokens (`d2t`) differs from the one pushed. "
            "Please report this with the vLLM version and the model's name."
        )


def _multiply(module: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor | None:
    """`rows` of shape (n, in_features) times a layer's weight, by the kernel and the copy that decoding uses."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if not isinstance(module, LinearBase | ParallelLMHead):
        return None
    rows = rows.to(module.weight.device, module.weight.dtype)
    return module.quant_method.apply(module, rows, None)
