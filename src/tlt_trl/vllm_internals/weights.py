"""Loading weights into a running engine, and reading them back."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .contract import UnsupportedEngineError
from .parts import EngineParts
from .read_back import Fingerprint, bits_checksum, compare_fingerprints, fingerprint_of_module, fingerprint_of_weight


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
        # A tensor-parallel rank holds slices of what is pushed; slices are not compared.
        verify = verify and self._parts.tensor_parallel_size == 1
        observed = self._observed(weights, fingerprints) if verify else iter(weights)
        model = self._parts.runner.model
        with set_current_vllm_config(self._parts.config), torch.no_grad():
            if self._parts.is_cpu:
                # The CPU backend packs linear weights and drops their loaders; the layerwise reload rebuilds both.
                with finished_after_failure(self.policy, self._parts.config.model_config):
                    self._parts.runner.reload_weights(weights_iterator=observed)
                repack_tied_head(model)
            else:
                for name, tensor in observed:
                    model.load_weights([(name, tensor)])
        self._check_read_back("policy", self.policy, fingerprints)

    def _observed(
        self, weights: Iterable[tuple[str, torch.Tensor]], fingerprints: dict[str, Fingerprint]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as they come, leaving a fingerprint of each."""
        for name, tensor in weights:
            # One pass without a temporary. Products with a broken weight differ from themselves, so without this the
            # comparison below would blame the engine.
            if tensor.numel() and not torch.linalg.vector_norm(tensor, float("inf")).isfinite():
                raise NonFinitePolicyError(
                    f"The policy's weight {name} holds NaN or infinity; nothing is sampled from it."
                )
            fingerprints[name] = fingerprint_of_weight(tensor, self._parts.dtype)
            yield name, tensor
        # A tied head is not among the weights, but the engine may multiply by a copy of its own.
        if "lm_head.weight" not in fingerprints and "model.embed_tokens.weight" in fingerprints:
            fingerprints["lm_head.weight"] = fingerprints["model.embed_tokens.weight"]

    def push_drafter(self, weights: Iterable[tuple[str, torch.Tensor]], verify: bool) -> None:
        """Loads the drafter's weights, see [`RolloutEngine.push_drafter`]."""
        weights = list(weights)
        if shared := [name for name, _ in weights if "embed_tokens" in name]:
            raise ValueError(f"The drafter shares the policy's embedding; refusing to load {shared} over it.")
        policy_embedding = bits_checksum(self.policy_embedding.data) if verify else None
        self._load_drafter(weights)
        if not verify:
            return
        if bits_checksum(self.policy_embedding.data) != policy_embedding:
            raise UnsupportedEngineError(
                "Loading the drafter changed the policy's embedding in the engine. Please report this with the vLLM "
                "version and the model's name."
            )
        check_mapping(self.drafter, dict(weights))
        dtype = self._parts.speculative_config.draft_model_config.dtype
        fingerprints = {
            name.replace("midlayer.", "layers.0."): fingerprint_of_weight(tensor, dtype)
            for name, tensor in weights
            if tensor.is_floating_point()
        }
        self._check_read_back("drafter", self.drafter, fingerprints)

    def _load_drafter(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with set_current_vllm_config(self._parts.config), torch.no_grad():
            if self._parts.is_cpu:
                initialize_layerwise_reload(self.drafter)
                self.drafter.load_weights(weights)
                finalize_layerwise_reload(self.drafter, self._parts.speculative_config.draft_model_config)
            else:
                self.drafter.load_weights(weights)

    def _check_read_back(self, what: str, model: torch.nn.Module, pushed: dict[str, Fingerprint]) -> None:
        if self._parts.tensor_parallel_size > 1 or not pushed:
            return
        with torch.no_grad():
            mismatches = compare_fingerprints(
                pushed, lambda name, shape: fingerprint_of_module(model, name, shape, _multiply)
            )
        if mismatches:
            raise WeightMismatchError(
                f"After the weight sync the engine's {what} differs from the one pushed in {len(mismatches)} tensors, "
                f"first {mismatches[0]}. Please report this with the vLLM version and the model's name."
            )


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


def _multiply(module: torch.nn.Module, row: torch.Tensor) -> torch.Tensor | None:
    """`row` of shape (1, in_features) times a layer's weight, by the kernel and the copy that decoding uses."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    if not isinstance(module, LinearBase | ParallelLMHead):
        return None
    row = row.to(module.weight.device, module.weight.dtype)
    return module.quant_method.apply(module, row, None)
