"""Ranks of one engine choose alike, whatever their selectors think, and seldom ask."""

import random

from tlt_trl.generation.leader import HOLD_STEPS, LeadersChoice
from tlt_trl.strategy import Strategy


STRATEGIES = [Strategy.off(), Strategy("eagle3", 1), Strategy("eagle3", 3), Strategy("ngram", 4)]
EDGES = [1, 2, 4, 8, 16]


class Group:
    """Two ranks; the follower hears, in order, what the leader has said."""

    def __init__(self):
        self.said, self.heard = [], 0
        self.leader = LeadersChoice(STRATEGIES, EDGES, self.say)
        self.follower = LeadersChoice(STRATEGIES, EDGES, self.hear)

    def say(self, number):
        self.said.append(number)
        return number

    def hear(self, number):
        self.heard += 1
        return self.said[self.heard - 1]

    def choices(self, batches, seeds=(0, 1)):
        """Choices of both ranks for the batches of a rollout, from selectors that know nothing of each other."""
        chosen = []
        for choice, seed in zip((self.leader, self.follower), seeds, strict=True):
            rng = random.Random(seed)
            choice.start_rollout()
            chosen.append([choice(batch, lambda _, rng=rng: rng.choice(STRATEGIES)) for batch in batches])
        return chosen


def test_the_follower_does_what_the_leader_does():
    batches = sorted(random.Random(5).choices(range(1, 17), k=300), reverse=True)
    leader, follower = Group().choices(batches)
    assert leader == follower
    assert set(leader) == set(STRATEGIES)


def test_it_asks_when_the_bucket_changes_and_once_in_a_while():
    group = Group()
    batches = [16] * (2 * HOLD_STEPS + 1) + [8] + [7, 5, 4] + [1] * 3
    group.choices(batches)
    # Three times for 16 running requests, then for 8 (with 7 and 5), 4, and 1.
    assert len(group.said) == group.heard == 3 + 3


def test_a_choice_is_held_in_between():
    leader, _ = Group().choices([12] * 4 * HOLD_STEPS)
    runs = [leader[start : start + HOLD_STEPS] for start in range(0, len(leader), HOLD_STEPS)]
    assert all(len(set(run)) == 1 for run in runs)
    assert len(set(leader)) > 1


def test_a_new_rollout_asks_at_once():
    group = Group()
    group.choices([3])
    group.choices([3])
    assert len(group.said) == group.heard == 2


def test_the_own_selector_is_asked_only_with_the_leader():
    asked = []
    choice = LeadersChoice(STRATEGIES, EDGES, lambda number: number)
    for _ in range(HOLD_STEPS):
        assert choice(2, lambda batch: (asked.append(batch), STRATEGIES[2])[1]) == STRATEGIES[2]
    assert asked == [2]
