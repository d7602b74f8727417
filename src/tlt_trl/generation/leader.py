"""One choice for all ranks of a tensor-parallel engine."""

from collections.abc import Callable, Sequence

from ..strategy import Strategy, bucket_index


# Steps for which a choice is held. Asking costs a collective and a copy to the host, for which the step waits.
HOLD_STEPS = 8


class LeadersChoice:
    """
    Gives all ranks of a tensor-parallel group the choice of their first rank, and asks for it once in a while.

    They run one engine together: ranks that drafted different numbers of tokens would wait for each other for ever.
    But each measures times of its own, so their selectors differ. All of them see the same batches, and therefore ask
    at the same steps without a word: when the batch has changed its bucket, and otherwise every `HOLD_STEPS` steps.

    Args:
        strategies (`Sequence[Strategy]`):
            The choices, in the same order on all ranks.
        bucket_edges (`Sequence[int]`):
            Upper edges of the batch buckets.
        from_leader (`Callable[[int], int]`):
            The number that the first rank passes; all ranks of the group call it at the same time.
    """

    def __init__(self, strategies: Sequence[Strategy], bucket_edges: Sequence[int], from_leader: Callable[[int], int]):
        self._strategies = list(strategies)
        self._edges = bucket_edges
        self._from_leader = from_leader
        self.start_rollout()

    def start_rollout(self) -> None:
        """Forgets what is held."""
        self._bucket, self._steps_left, self._held = -1, 0, Strategy.off()

    def __call__(self, batch_size: int, choose: Callable[[int], Strategy]) -> Strategy:
        """
        The strategy for the next step.

        Args:
            batch_size (`int`):
                Requests that run in the step.
            choose (`Callable[[int], Strategy]`):
                This rank's own choice for a batch size; called only when the leader is asked.
        """
        bucket = bucket_index(self._edges, batch_size)
        if bucket != self._bucket or not self._steps_left:
            own = self._strategies.index(choose(batch_size))
            self._held = self._strategies[self._from_leader(own)]
            self._bucket, self._steps_left = bucket, HOLD_STEPS
        self._steps_left -= 1
        return self._held
