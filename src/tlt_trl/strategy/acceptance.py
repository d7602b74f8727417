"""How many draft tokens are accepted, by position. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence


class AcceptanceModel:
    """
    Acceptance of each draft position given that the one before was accepted, with exponential forgetting.

    Position `i` starts from the rate of position `i - 1`, so that lengths never tried are extrapolated.

    Args:
        num_positions (`int`):
            Longest draft.
        memory (`float`, *optional*, defaults to `300.0`):
            Requests after which an observation has lost most of its weight. Counting requests, not steps, keeps the
            noise the same at batch 1 and batch 64.
        prior (`float`, *optional*, defaults to `0.6`):
            Acceptance of the first position before anything was seen, worth `prior_weight` requests.
        prior_weight (`float`, *optional*, defaults to `4.0`):
            How many requests the prior of each position counts for.
    """

    def __init__(
        self, num_positions: int, memory: float = 300.0, prior: float = 0.6, prior_weight: float = 4.0
    ) -> None:
        self.memory = memory
        self.prior = prior
        self.prior_weight = prior_weight
        self.hits = [0.0] * num_positions
        self.trials = [0.0] * num_positions

    def update(self, batch_size: int, accepted_by_position: Sequence[float]) -> None:
        """Of `batch_size` requests, `accepted_by_position[i - 1]` accepted draft token `i`, counted from 1."""
        self.forget(max(0.0, 1.0 - batch_size / self.memory))
        reached: float = batch_size
        for i, accepted in enumerate(accepted_by_position):
            self.trials[i] += reached
            self.hits[i] += accepted
            reached = accepted

    def forget(self, keep: float) -> None:
        """Scales the weight of everything seen so far; 0.0 returns to the prior."""
        self.hits = [hits * keep for hits in self.hits]
        self.trials = [trials * keep for trials in self.trials]

    def expected_tokens(self) -> list[float]:
        """Expected tokens per request for 0, 1, ... draft tokens, of shape (num_positions + 1,)."""
        tokens, reach, rate = [1.0], 1.0, self.prior
        for hits, trials in zip(self.hits, self.trials, strict=True):
            rate = (hits + self.prior_weight * rate) / (trials + self.prior_weight)
            reach *= rate
            tokens.append(tokens[-1] + reach)
        return tokens

    def state_dict(self) -> dict:
        return {"hits": list(self.hits), "trials": list(self.trials)}

    def load_state_dict(self, state: dict) -> None:
        self.hits, self.trials = list(state["hits"]), list(state["trials"])


def spread_accepted(batch_size: int, num_draft_tokens: int, accepted_tokens: int) -> list[float]:
    """
    Accepted draft tokens by position when only their sum is known: assumes one constant acceptance for all positions.

    ```python
    >>> [round(x, 6) for x in spread_accepted(4, 2, 3)]
    [2.0, 1.0]
    ```
    """
    target = accepted_tokens / batch_size
    low, high = 0.0, 1.0
    for _ in range(30):
        rate = 0.5 * (low + high)
        if sum(rate**i for i in range(1, num_draft_tokens + 1)) < target:
            low = rate
        else:
            high = rate
    return [batch_size * high**i for i in range(1, num_draft_tokens + 1)]
