"""How far the engine's drafter is behind the one that is trained."""


class DrafterLag:
    """
    Counts trainings of the drafter that the engine has missed.

    TRL syncs before the first rollout of a policy step. What is trained later, between the turns of a tool loop or the
    rollouts of one step, is pushed with the next one, so only the first rollout of a step counts.

    Attributes:
        trainings (`int`):
            Missed by the engine in the rollout noted last.
    """

    def __init__(self) -> None:
        self.trainings = 0
        self._trained = self._pushed = 0
        self._policy_step: int | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the drafter was trained since it was pushed last."""
        return self._trained > self._pushed

    def note_trained(self) -> None:
        """The drafter is another one than the engine's."""
        self._trained += 1

    def note_pushed(self) -> None:
        """The engine's drafter is the one that is trained."""
        self._pushed = self._trained

    def note_rollout(self, policy_step: int) -> None:
        """A rollout's samples are there."""
        if policy_step != self._policy_step:
            self._policy_step, self.trainings = policy_step, self._trained - self._pushed
