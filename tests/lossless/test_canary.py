"""The canary's own statistics, and that it catches what engines got wrong, without an engine."""

import math

import pytest
import torch
from tests.tolerance import tolerance

from tlt_trl.generation.canary import (
    ENGINE_LOGPROB_TOLERANCES,
    check_engine_logprobs,
    check_sampler,
    chi_square_p_value,
    exact_probabilities,
    failure_message,
)


CPU = torch.device("cpu")


def make_sampler(temperature_factor=1.0, ignore=(), logprob_shift=0, mix_temperatures=False, accept_all=False):
    """
    Rejection sampling in plain torch as `RolloutEngine.rejection_sample` does it, and its faults on demand.

    Args:
        temperature_factor: What the sampler multiplies the temperature by.
        ignore: Filters that it ignores, `"top_p"` or `"top_k"`.
        logprob_shift: Positions by which the returned log-probs are shifted.
        mix_temperatures: Whether every request is sampled at the temperature of its neighbour.
        accept_all: Whether drafts are accepted unseen.
    """

    def rejection_sample(logits, drafts, draft_probs, temperature, top_p, top_k):
        batch, num_positions, vocab_size = logits.shape
        wanted = temperature.roll(1) if mix_temperatures else temperature
        filters = {"top_p": top_p, "top_k": top_k}
        for name in ignore:
            filters[name] = {"top_p": 1.0, "top_k": 0}[name]
        target = torch.empty(batch, num_positions, vocab_size, dtype=torch.float64)
        for value in wanted.unique().tolist():
            rows = wanted == value
            target[rows] = exact_probabilities(logits[rows][:1], value * temperature_factor, **filters)
        if draft_probs is None:
            draft_probs = torch.nn.functional.one_hot(drafts, vocab_size)
        draft_probs = draft_probs.double()
        p = target[:, :-1].gather(-1, drafts[..., None])[..., 0]
        q = draft_probs.gather(-1, drafts[..., None])[..., 0]
        accepted = torch.rand(p.shape, dtype=torch.float64) < p / q
        if accept_all:
            accepted[:] = True
        residual = (target[:, :-1] - draft_probs).clamp_min(0) + 1e-300
        # Where nothing is left every draft was accepted, and what is drawn there is not used.
        recovered = torch.multinomial(residual.flatten(0, 1), 1).view(p.shape)
        bonus = torch.multinomial(target[:, -1], 1)
        tokens = torch.cat([torch.where(accepted, drafts, recovered), bonus], dim=1)
        alive = torch.cat([torch.ones(batch, 1, dtype=torch.bool), accepted.cumprod(1).bool()], dim=1)
        logprobs = target.log().gather(-1, tokens[..., None])[..., 0].roll(logprob_shift, dims=1).float()
        return tokens.masked_fill(~alive, -1), logprobs

    return rejection_sample


def failed_checks(sampler, **kwargs):
    return [result.name for result in check_sampler(sampler, CPU, **kwargs) if not result.ok]


@pytest.mark.parametrize("seed", range(20))
def test_a_correct_sampler_passes(seed):
    assert failed_checks(make_sampler(), seed=seed) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_temperature_that_is_off_by_ten_percent_is_caught_everywhere(factor, seed):
    failed = failed_checks(make_sampler(temperature_factor=factor), seed=seed)
    # The log-probs show it too, but an engine may get those right and the tokens wrong.
    frequencies = [name for name in failed if "distribution" in name]
    assert len(frequencies) >= 10  # of 12 cases


@pytest.mark.parametrize("name", ["top_p", "top_k"])
def test_an_ignored_filter_is_caught(name):
    failed = failed_checks(make_sampler(ignore=[name]))
    frequencies = [check for check in failed if "distribution" in check]
    assert len(frequencies) == 4 and all(name in check for check in failed)


def test_the_temperature_of_another_request_is_caught():
    assert any("distribution" in name for name in failed_checks(make_sampler(mix_temperatures=True)))


def test_drafts_that_are_accepted_unseen_are_caught():
    assert any("distribution" in name for name in failed_checks(make_sampler(accept_all=True)))


def test_shifted_logprobs_are_caught():
    failed = failed_checks(make_sampler(logprob_shift=1))
    assert failed and all("log-probs" in name for name in failed)


def test_a_sampler_that_raises_is_a_failed_check():
    def raises(logits, drafts, draft_probs, temperature, top_p, top_k):
        if top_k:
            raise RuntimeError("selected index k out of range")
        return make_sampler()(logits, drafts, draft_probs, temperature, top_p, top_k)

    results = [result for result in check_sampler(raises, CPU) if not result.ok]
    assert len(results) == 2 and all("index k out of range" in result.detail for result in results)


def test_the_message_names_the_cause_and_where_to_look():
    message = failure_message(check_sampler(make_sampler(temperature_factor=1.1), CPU))
    assert "temperature" in message and "tlt-trl doctor" in message


def test_the_random_state_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    check_sampler(make_sampler(), CPU, num_requests=100)
    assert torch.equal(torch.rand(4), expected)


# ---- statistics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "probabilities", "expected"),
    [
        # Two cells, one degree of freedom: statistic 4, P = erfc(sqrt(4 / 2)).
        ([60, 40], [0.5, 0.5], math.erfc(math.sqrt(2.0))),
        # Three cells, two degrees of freedom: statistic 6, P = exp(-6 / 2).
        ([120, 90, 90], [1 / 3, 1 / 3, 1 / 3], math.exp(-3.0)),
        ([50, 50], [0.5, 0.5], 1.0),
        ([100, 0], [1.0, 0.0], 1.0),
        ([99, 1], [1.0, 0.0], 0.0),
    ],
)
def test_chi_square_p_value(counts, probabilities, expected):
    p_value = chi_square_p_value(torch.tensor(counts), torch.tensor(probabilities, dtype=torch.float64))
    # A series for the incomplete gamma function, of fewer than 1000 terms.
    assert p_value == pytest.approx(expected, rel=0, abs=tolerance(torch.float64, num_operations=1000, scale=1.0))


def test_chi_square_merges_small_cells():
    # 60 cells that expect half a sample each become one that expects 30.
    probabilities = torch.tensor([0.7] + [0.3 / 60] * 60, dtype=torch.float64)
    counts = torch.tensor([70, 30] + [0] * 59)
    assert chi_square_p_value(counts, probabilities) == 1.0


def test_chi_square_of_true_samples_is_uniform():
    torch.manual_seed(0)
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    values = [
        chi_square_p_value(
            torch.bincount(torch.multinomial(probabilities, 1000, replacement=True), minlength=4), probabilities
        )
        for _ in range(400)
    ]
    assert sum(value < 0.1 for value in values) == pytest.approx(40, abs=25)


def test_exact_probabilities():
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0]).log()
    assert exact_probabilities(logits, 1.0).tolist() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    # Half the temperature squares the odds.
    assert exact_probabilities(logits, 0.5).tolist() == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30])
    assert exact_probabilities(logits, 1.0, top_k=2).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    # 0.4 + 0.3 is not yet 0.75, so the third is kept as well.
    assert exact_probabilities(logits, 1.0, top_p=0.75).tolist() == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    # Top-k first, then top-p of what is left: 4/9 + 3/9 reaches 0.6.
    assert exact_probabilities(logits, 1.0, top_p=0.6, top_k=3).tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert exact_probabilities(logits, 1.0, top_p=1e-6).tolist() == [1.0, 0, 0, 0]


@pytest.mark.parametrize("dtype", ENGINE_LOGPROB_TOLERANCES)
def test_engine_logprobs(dtype):
    tolerance = ENGINE_LOGPROB_TOLERANCES[dtype]
    plain = -torch.rand(96, generator=torch.Generator().manual_seed(0)) * 3
    assert check_engine_logprobs(plain + 0.5 * tolerance["mean"], plain, dtype).ok
    assert not check_engine_logprobs(plain + 1.5 * tolerance["mean"], plain, dtype).ok
    one_wrong = plain.clone()
    one_wrong[5] += 1.5 * tolerance["max"]
    assert not check_engine_logprobs(one_wrong, plain, dtype).ok
    assert not check_engine_logprobs(plain.roll(1), plain, dtype).ok  # log-probs of the neighbour
