"""One strategy below a batch size, plain decoding above: the activation threshold of TLT (arXiv 2511.16665)."""

from __future__ import annotations

import random

from .selector import Selector
from .strategy import Strategy, bucket_edges, with_off


class FixedSelector(Selector):
    """
    Uses `strategy` when `batch_size <= activation_threshold`, else none. Learns nothing, but keeps totals.

    Args:
        strategy (`Strategy`):
            The strategy to use.
        activation_threshold (`int`, *optional*):
            Largest batch that speculates. TLT uses 32. `None` speculates at every batch size.
        max_batch_size (`int`, *optional*, defaults to `1024`):
            Largest batch accepted; only sets the rows of `summary`.
    """

    def __init__(
        self, strategy: Strategy, activation_threshold: int | None = None, max_batch_size: int = 1024
    ) -> None:
        if activation_threshold is not None and activation_threshold < 0:
            raise ValueError(
                f"activation_threshold={activation_threshold} must be at least 0, or None to speculate always."
            )
        super().__init__(with_off([strategy]), bucket_edges(max_batch_size), random.Random(0))
        self.activation_threshold = activation_threshold
        self._arm = self.strategies.index(strategy)
        self._off_arm = self.strategies.index(Strategy.off())

    def _choose(self, bucket: int, batch_size: int, context_tokens: int) -> int:
        active = self.activation_threshold is None or batch_size <= self.activation_threshold
        return self._arm if active else self._off_arm
