"""Which vLLM is supported, and how its private names are read and replaced."""

import operator
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from packaging.specifiers import SpecifierSet


SUPPORTED_VLLM = SpecifierSet(">=0.31,<0.32")

# Names replaced so far, by the object that holds them.
_replaced: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


class UnsupportedEngineError(RuntimeError):
    """The vLLM engine is not one that this package knows how to drive."""


def check_vllm_version() -> None:
    """Raises [`UnsupportedEngineError`] unless the installed vLLM is one that was tested."""
    if not _is_tested_version():
        raise UnsupportedEngineError(_untested_version_message())


def why_vllm_is_unsupported() -> str | None:
    """What is wrong with the installed vLLM, or with the way it is told to run; `None` when nothing is."""
    if not _is_tested_version():
        return _untested_version_message()
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
        return (
            "The environment sets VLLM_USE_V2_MODEL_RUNNER, and only vLLM's V1 model runner is driven here. "
            "Speculation comes back without that variable."
        )
    return None


def _is_tested_version() -> bool:
    import vllm

    return SUPPORTED_VLLM.contains(vllm.__version__.split("+")[0], prereleases=True)


def _untested_version_message() -> str:
    import vllm

    return (
        f"vLLM {vllm.__version__} is installed, but speculative rollouts were tested with vllm{SUPPORTED_VLLM} only. "
        "Install a version in that range, or use TRL's GRPOTrainer, which runs without speculation."
    )


def require(owner: Any, path: str) -> Any:
    """
    Reads an attribute of vLLM that may be private.

    Raises:
        [`UnsupportedEngineError`]: If it is not there; the message names the supported versions.
    """
    try:
        return operator.attrgetter(path)(owner)
    except AttributeError as error:
        raise UnsupportedEngineError(
            f"`{path}` was not found on {_name(owner)}. This package drives vllm{SUPPORTED_VLLM} built in the "
            "training process (TRL's `vllm_mode='colocate'`); another version or a multi-process engine looks "
            "different inside."
        ) from error


def replace(owner: Any, name: str, replacement: Any) -> Any:
    """
    Replaces an attribute of one of vLLM's objects.

    Returns:
        `Any`: What was there.

    Raises:
        [`UnsupportedEngineError`]: If nothing was there.
        `RuntimeError`: If this package has replaced it before: two drivers of one engine would each see the other's.
    """
    original = require(owner, name)
    names = _replaced.setdefault(owner, set())
    if name in names:
        raise RuntimeError(
            f"`{name}` of this {_name(owner)} was replaced before. An engine can be driven by one `RolloutEngine` "
            "only; use the one that there is, or build another `vllm.LLM`."
        )
    names.add(name)
    setattr(owner, name, replacement)
    return original


def _name(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, type | ModuleType) else type(owner).__name__


def supports_eagle3(architectures: Sequence[str]) -> bool:
    """Whether vLLM's class for one of these architectures gives away the hidden states that the drafter reads."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    # The first name that vLLM knows decides, as in its own resolution.
    known = next((name for name in architectures if name in ModelRegistry.models), None)
    return known is not None and supports_eagle3(ModelRegistry.models[known].load_model_cls())


def no_auxiliary_states_message(architectures: Sequence[str]) -> str:
    """What to tell somebody whose policy cannot be drafted for."""
    return (
        f"A policy of architecture {', '.join(architectures)} cannot be drafted for: its class in vLLM does not give "
        "away auxiliary hidden states (`SupportsEagle3`), which the drafter reads. Those of Llama, Mistral, Qwen2 and "
        "Qwen3 do."
    )
