"""Which of the configured strategies an engine can run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from .strategy import Strategy


logger = logging.getLogger(__name__)


def strategies_for(strategies: Sequence[Strategy], can_look_up: bool) -> list[Strategy]:
    """
    The strategies that the engine can run.

    Args:
        strategies (`Sequence[Strategy]`):
            What the user has asked for.
        can_look_up (`bool`):
            Whether draft tokens can be looked up in earlier answers. If not, such strategies are left out, with a
            warning.
    """
    lookups = [str(strategy) for strategy in strategies if strategy.method == "ngram"]
    if can_look_up or not lookups:
        return list(strategies)
    logger.warning(
        "%s left out: no draft tokens are looked up in earlier answers, since the engine schedules asynchronously "
        "(`vllm_engine_kwargs={'async_scheduling': False}` makes it possible), or the policy's layers have several "
        "kinds of attention, or the drafter has several layers. A `speculation_strategies` without them says that "
        "they are not wanted.",
        ", ".join(lookups),
    )
    return [strategy for strategy in strategies if strategy.method != "ngram"]
