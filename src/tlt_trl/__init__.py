"""GRPO with speculative rollouts and an online drafter, as a drop-in for TRL's `GRPOTrainer`."""

from typing import TYPE_CHECKING

from ._version import __version__


if TYPE_CHECKING:
    from .drafter import Drafter, DrafterConfig
    from .tlt_grpo_config import TLTGRPOConfig
    from .tlt_grpo_trainer import TLTGRPOTrainer

__all__ = ["Drafter", "DrafterConfig", "TLTGRPOConfig", "TLTGRPOTrainer", "__version__"]

_HOMES = {
    "Drafter": "drafter",
    "DrafterConfig": "drafter",
    "TLTGRPOConfig": "tlt_grpo_config",
    "TLTGRPOTrainer": "tlt_grpo_trainer",
}


def __getattr__(name: str):
    # Lazy, so that `tlt_trl.strategy` and the vLLM plugin do not pay for transformers and TRL.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
