"""Which speculation to use for the next engine step. Needs numpy, never torch or vLLM."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .auto import AutoSelector
from .beg_mab import BEGMAB
from .cost_model import CostModel, CostModelSelector
from .fixed import FixedSelector
from .ledger import StepLedger, describe, ledger_metrics
from .menu import strategies_for
from .selector import Selector
from .strategy import Strategy, bucket_edges, bucket_index, check_strategies


__all__ = [
    "BEGMAB",
    "AutoSelector",
    "CostModel",
    "CostModelSelector",
    "FixedSelector",
    "Selector",
    "StepLedger",
    "Strategy",
    "bucket_edges",
    "bucket_index",
    "describe",
    "ledger_metrics",
    "make_selector",
    "strategies_for",
]


def make_selector(
    name: str, strategies: Sequence[Strategy], max_batch_size: int, seed: int = 0, **options
) -> Selector:
    """
    Builds a selector.

    Args:
        name (`str`):
            `"fixed"`, `"beg_mab"`, `"cost_model"` or `"auto"`.
        strategies (`Sequence[Strategy]`):
            The choices. The adaptive selectors add "off" when it is missing; `"fixed"` needs exactly one other.
        max_batch_size (`int`):
            Largest batch the engine runs (`max_num_seqs`).
        seed (`int`, *optional*, defaults to `0`):
            Seed of the exploration.
        **options:
            Passed to the selector's class, such as `activation_threshold` for `"fixed"`.
    """
    strategies = check_strategies(strategies)
    edges = options.pop("bucket_edges", None) or bucket_edges(max_batch_size)
    if name == "fixed":
        speculating = [s for s in strategies if not s.is_off]
        if len(speculating) != 1:
            raise ValueError(
                f"strategies={[str(s) for s in strategies]} has {len(speculating)} that speculate; selector 'fixed' "
                "needs exactly one, 'auto' chooses among several."
            )
        return FixedSelector(speculating[0], max_batch_size=max_batch_size, **options)
    if name == "beg_mab":
        return BEGMAB(strategies, edges, rng=random.Random(seed), **options)
    if name == "cost_model":
        return CostModelSelector(strategies, edges, rng=random.Random(seed), **options)
    if name == "auto":
        return AutoSelector(strategies, edges, rng=random.Random(seed), **options)
    raise ValueError(f"selector={name!r} is not known; use 'fixed', 'beg_mab', 'cost_model' or 'auto'.")
