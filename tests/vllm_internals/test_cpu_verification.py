"""The quick verification of the CPU backend against vLLM's, and against exact probabilities."""

from types import SimpleNamespace

import pytest
import torch

from tlt_trl.generation.canary import chi_square_p_value
from tlt_trl.vllm_internals.cpu_verification import count_not_below, is_plain_sampling, log_normalisers, verify


pytest.importorskip("vllm")

VOCAB = 7


def logits_of(*shape):
    return 2 * torch.randn(*shape, VOCAB)


def outcome_counts(tokens, num_positions):
    """How often each sequence of the first tokens was emitted, coded as one number; shape (VOCAB ** positions,)."""
    code = torch.zeros(len(tokens), dtype=torch.long)
    for position in range(num_positions):
        code = code * VOCAB + tokens[:, position].long()
    return torch.bincount(code, minlength=VOCAB**num_positions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("probabilistic", [False, True])
def test_first_token_follows_the_policy(probabilistic, temperature, dtype):
    torch.manual_seed(0)
    num_samples = 30_000
    logits = logits_of(3).to(dtype)
    draft_probs, drafts = None, logits[:2].argmax(-1).repeat(num_samples)
    if probabilistic:
        q = logits_of(2).softmax(-1)
        drafts = torch.multinomial(q, num_samples, replacement=True).T.flatten()
        draft_probs = q.repeat(num_samples, 1)
    tokens, _, _ = verify(
        logits.repeat(num_samples, 1), torch.full((num_samples,), temperature), drafts, [2] * num_samples, draft_probs
    )
    policy = (logits.double() / temperature).softmax(-1)
    assert chi_square_p_value(outcome_counts(tokens, 1), policy[0]) > 1e-6
    # Where the first draft token was accepted, the second one follows the policy's next distribution.
    accepted = tokens[(tokens[:, 1] >= 0)]
    assert len(accepted) > 500
    assert chi_square_p_value(outcome_counts(accepted[:, 1:], 1), policy[1]) > 1e-6
    all_accepted = tokens[(tokens[:, 2] >= 0)]
    assert len(all_accepted) > 100
    assert chi_square_p_value(outcome_counts(all_accepted[:, 2:], 1), policy[2]) > 1e-6


def test_a_wrong_distribution_is_seen():
    torch.manual_seed(0)
    num_samples = 30_000
    logits = logits_of(2)
    tokens, _, _ = verify(
        logits.repeat(num_samples, 1), torch.ones(num_samples), torch.full((num_samples,), 2), [1] * num_samples, None
    )
    assert chi_square_p_value(outcome_counts(tokens, 1), (logits[0].double() / 1.1).softmax(-1)) < 1e-6


def test_requests_with_other_numbers_of_draft_tokens_do_not_mix():
    # The policy is sure of token `row % VOCAB` in every row, so every outcome is known.
    rows = torch.arange(9)
    logits = torch.full((9, VOCAB), -50.0)
    logits[rows, rows % VOCAB] = 50.0
    counts = [2, 0, 3, 0]  # rows 0-2, 3, 4-7, 8
    drafts = torch.tensor([0, 5, 4, 5, 6])
    tokens, logprobs, ranks = verify(logits, torch.ones(4), drafts, counts, None)
    assert tokens.tolist() == [[0, 1, -1, -1], [3, -1, -1, -1], [4, 5, 6, 0], [1, -1, -1, -1]]
    assert tokens.dtype == torch.int32
    assert ranks[tokens >= 0].tolist() == [1] * 8 and not logprobs.any()


def test_padding_is_never_accepted():
    logits = torch.zeros(3, VOCAB)
    for _ in range(20):
        tokens, _, _ = verify(logits, torch.ones(1), torch.tensor([-1, 3]), [2], None)
        assert tokens[0, 0] >= 0 and tokens[0, 1:].tolist() == [-1, -1]


def test_what_the_drafter_cannot_draft_is_rejected():
    q = torch.zeros(1, VOCAB)
    q[0, 0] = 1.0
    tokens, _, _ = verify(torch.zeros(2, VOCAB), torch.ones(1), torch.tensor([3]), [1], q)
    assert tokens[0, 1] == -1 and tokens[0, 0] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_ranks_are_those_of_the_policy(dtype):
    torch.manual_seed(1)
    logits, temperature, counts = logits_of(11).to(dtype), torch.tensor([0.5, 1.0, 2.0]), [3, 1, 4]
    drafts = torch.randint(VOCAB, (8,))
    tokens, logprobs, ranks = verify(logits, temperature, drafts, counts, None)
    first_row = [0, 4, 6]
    for request, start in enumerate(first_row):
        for position in range(int((tokens[request] >= 0).sum())):
            row = (logits[start + position].double() / temperature[request]).log_softmax(-1)
            token = int(tokens[request, position])
            # Four roundings of numbers up to 16: quotient, exponential, sum and difference.
            assert logprobs[request, position].item() == pytest.approx(row[token].item(), abs=4 * 16 * 2**-24)
            assert ranks[request, position] == (row >= row[token]).sum()


def test_compiled_parts_equal_eager_ones():
    logits, temperature = logits_of(6).bfloat16(), torch.rand(6) + 0.5
    expected = (logits.double() / temperature[:, None]).logsumexp(-1)
    assert torch.allclose(log_normalisers(logits, temperature).double(), expected, rtol=0, atol=4 * 16 * 2**-24)
    rows = torch.tensor([4, 0])
    values = logits[rows, torch.tensor([1, 2])]
    assert count_not_below(logits, rows, values).tolist() == (logits[rows] >= values[:, None]).sum(-1).tolist()


class Idle:
    """A step that samples with temperatures alone."""

    def __init__(self, **changes):
        from vllm.v1.sample.logits_processor import LogitsProcessors

        self.metadata = SimpleNamespace(
            **{
                "all_random": True,
                "top_k": None,
                "top_p": None,
                "generators": {},
                "no_penalties": True,
                "bad_words_token_ids": {},
                "allowed_token_ids_mask": None,
                "thinking_budget_state_holder": None,
                "max_num_logprobs": 0,
                "logitsprocs": LogitsProcessors(),
            }
            | changes
        )


@pytest.mark.parametrize(
    "change",
    [
        {"all_random": False},
        {"top_k": torch.ones(1)},
        {"top_p": torch.ones(1)},
        {"generators": {0: torch.Generator()}},
        {"no_penalties": False},
        {"bad_words_token_ids": {0: [[1]]}},
        {"allowed_token_ids_mask": torch.ones(1)},
        {"max_num_logprobs": 3},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_else_is_left_to_vllm(change):
    assert is_plain_sampling(Idle().metadata, "processed_logprobs")
    assert not is_plain_sampling(Idle(**change).metadata, "processed_logprobs")
    assert not is_plain_sampling(Idle().metadata, "raw_logprobs")


def test_active_logits_processors_are_left_to_vllm():
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor

    idle, active = (LogitBiasLogitsProcessor(None, torch.device("cpu"), False) for _ in range(2))
    active.biases = {0: {1: 2.0}}
    assert is_plain_sampling(Idle(logitsprocs=LogitsProcessors([idle])).metadata, "processed_logprobs")
    assert not is_plain_sampling(Idle(logitsprocs=LogitsProcessors([active])).metadata, "processed_logprobs")
    other = SimpleNamespace(is_argmax_invariant=lambda: False)
    assert not is_plain_sampling(Idle(logitsprocs=LogitsProcessors([other])).metadata, "processed_logprobs")
