"""What a speculation strategy is, and how batch sizes are grouped into buckets. Standard library only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


METHODS = ("off", "eagle3", "ngram")
DRAFT_SAMPLINGS = ("greedy", "probabilistic")


@dataclass(frozen=True, slots=True)
class Strategy:
    """
    How one engine step speculates.

    vLLM verifies chains only, so a strategy is a drafting method and a length; there are no trees.

    Args:
        method (`str`):
            `"off"` (plain decoding), `"eagle3"` (trained drafter) or `"ngram"` (lookup in earlier text).
        num_draft_tokens (`int`):
            Tokens drafted per running request and step. 0 if and only if `method` is `"off"`.
        draft_sampling (`str`, *optional*, defaults to `"greedy"`):
            How the drafter picks its tokens: `"greedy"` or `"probabilistic"`.

    Example:

    ```python
    >>> str(Strategy("eagle3", 3))
    'eagle3 x3'
    >>> Strategy.parse("eagle3 x3") == Strategy("eagle3", 3)
    True
    ```
    """

    method: str
    num_draft_tokens: int
    draft_sampling: str = "greedy"

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is not known; use one of {METHODS}.")
        if self.draft_sampling not in DRAFT_SAMPLINGS:
            raise ValueError(f"draft_sampling={self.draft_sampling!r} is not known; use one of {DRAFT_SAMPLINGS}.")
        if self.draft_sampling != "greedy" and self.method != "eagle3":
            raise ValueError(
                f"draft_sampling={self.draft_sampling!r} has no effect with method={self.method!r}: only a drafter "
                "samples."
            )
        if type(self.num_draft_tokens) is not int or self.num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens={self.num_draft_tokens!r} must be an integer of at least 0.")
        if (self.method == "off") != (self.num_draft_tokens == 0):
            raise ValueError(
                f"num_draft_tokens={self.num_draft_tokens} does not fit method={self.method!r}: "
                "use 0 with 'off' and at least 1 with every other method."
            )

    @classmethod
    def off(cls) -> Strategy:
        """Plain decoding."""
        return cls("off", 0)

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Reads what `str(strategy)` writes: `"off"`, `"eagle3 x3"`, `"eagle3 x3 probabilistic"`."""
        words = text.split()
        if words == ["off"]:
            return cls.off()
        if len(words) not in (2, 3) or not (words[1].startswith("x") and words[1][1:].isdecimal()):
            raise ValueError(f"strategy={text!r} cannot be read; write it like 'off', 'eagle3 x3' or 'ngram x4'.")
        return cls(words[0], int(words[1][1:]), *words[2:])

    @property
    def is_off(self) -> bool:
        return self.num_draft_tokens == 0

    def __str__(self) -> str:
        if self.is_off:
            return "off"
        suffix = "" if self.draft_sampling == "greedy" else f" {self.draft_sampling}"
        return f"{self.method} x{self.num_draft_tokens}{suffix}"


def bucket_edges(max_batch_size: int) -> list[int]:
    """
    Upper edges of the batch buckets: powers of two, the last one being `max_batch_size` itself.

    ```python
    >>> bucket_edges(8)
    [1, 2, 4, 8]
    >>> bucket_edges(12)
    [1, 2, 4, 8, 12]
    ```
    """
    if type(max_batch_size) is not int or max_batch_size < 1:
        raise ValueError(f"max_batch_size={max_batch_size!r} must be an integer of at least 1.")
    edges = [1]
    while edges[-1] < max_batch_size:
        edges.append(min(2 * edges[-1], max_batch_size))
    return edges


def bucket_index(edges: Sequence[int], batch_size: int) -> int:
    """Index of the bucket that holds `batch_size`: the first whose upper edge is not below it."""
    if not 1 <= batch_size <= edges[-1]:
        raise ValueError(
            f"batch_size={batch_size} is outside 1..{edges[-1]}; build the selector with the engine's max_num_seqs."
        )
    return bisect_left(edges, batch_size)


def check_edges(edges: Sequence[int]) -> list[int]:
    """Returns `edges` as a list after checking that they are positive and strictly increasing."""
    edges = list(edges)
    if not edges or edges[0] < 1 or any(low >= high for low, high in zip(edges, edges[1:], strict=False)):
        raise ValueError(f"bucket_edges={edges} must be strictly increasing from at least 1, such as [1, 2, 4, 8].")
    return edges


def check_strategies(strategies: Sequence[Strategy]) -> list[Strategy]:
    """Returns `strategies` as a list after checking that it is not empty and repeats nothing."""
    strategies = list(strategies)
    if not strategies:
        raise ValueError("strategies=[] is empty; give at least one, such as [Strategy('eagle3', 3)].")
    repeated = sorted({str(s) for s in strategies if strategies.count(s) > 1})
    if repeated:
        raise ValueError(f"strategies repeats {repeated}; give each strategy once.")
    return strategies


def with_off(strategies: Sequence[Strategy]) -> list[Strategy]:
    """Adds "no speculation" in front when it is missing: it must always be one of the choices."""
    strategies = check_strategies(strategies)
    return strategies if Strategy.off() in strategies else [Strategy.off(), *strategies]
