import pytest
import torch

from tlt_trl.drafter import Drafter, FeatureBuffer
from tlt_trl.drafter.live_vocabulary import LiveVocabulary
from tlt_trl.drafter.vocabulary import default_draft_vocab_size


@pytest.fixture
def drafter(policy):
    return Drafter.from_policy(policy, torch.arange(0, 64))


@pytest.fixture
def say(make_sample):
    """A buffer whose samples hold these tokens."""

    def make(*texts):
        buffer = FeatureBuffer(10_000)
        for text in texts:
            sample = make_sample(len(text))
            sample.input_ids.copy_(torch.tensor(text))
            buffer.add(sample)
        return buffer

    return make


def test_it_follows_the_answers_after_the_first_rollout(drafter, policy, say):
    vocabulary = LiveVocabulary(drafter, say([100, 101, 100, 3, 127]), lambda counts: counts)
    assert not vocabulary.follow()  # before the first rollout
    assert vocabulary.follow()
    # Seen tokens first, then those that were there before, smallest id first.
    assert drafter.draft_token_ids.tolist() == [*range(61), 100, 101, 127]
    assert drafter.t2d.nonzero()[:, 0].tolist() == drafter.draft_token_ids.tolist()
    drafter.copy_head(policy.lm_head.weight)
    assert torch.equal(drafter.lm_head.weight, policy.lm_head.weight[drafter.draft_token_ids])


def test_it_is_asked_less_and_less(drafter, say):
    asked = []
    vocabulary = LiveVocabulary(drafter, say([1, 2, 3]), lambda counts: asked.append(True) or counts)
    number_asked = []
    for _ in range(18):
        assert not vocabulary.follow()  # these tokens are in it already
        number_asked.append(len(asked))
    assert number_asked == [0, 1, 2, 2, 3, 3, 3, 3, *[4] * 8, 5, 5]


def test_counts_of_all_ranks_decide(drafter, say):
    def with_another_rank(counts):
        return counts + 2 * torch.nn.functional.one_hot(torch.tensor(90), len(counts))

    vocabulary = LiveVocabulary(drafter, say([3]), with_another_rank)
    assert [vocabulary.follow() for _ in range(2)] == [False, True]
    assert drafter.draft_token_ids.tolist() == [*range(63), 90]


@pytest.mark.parametrize("options", [{"draft_token_ids": torch.arange(64), "head": "own"}, {}], ids=["own", "whole"])
def test_others_keep_their_vocabulary(policy, say, options):
    drafter = Drafter.from_policy(policy, **options)
    vocabulary = LiveVocabulary(drafter, say([100]), lambda counts: counts)
    before = drafter.draft_token_ids.tolist()
    assert not any(vocabulary.follow() for _ in range(5)) and drafter.draft_token_ids.tolist() == before


def test_a_trained_head_cannot_get_other_tokens(policy):
    with pytest.raises(ValueError, match="only the policy's head"):
        Drafter.from_policy(policy, torch.arange(64), head="own").choose_vocabulary(torch.arange(1, 65))


@pytest.mark.parametrize(
    ("vocab_size", "size"), [(64, 64), (8192, 8192), (9000, 8192), (49152, 12288), (151936, 37952)]
)
def test_default_size(vocab_size, size):
    assert default_draft_vocab_size(vocab_size) == size
