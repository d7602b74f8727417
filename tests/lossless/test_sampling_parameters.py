"""
One test per sampling parameter: what it does in a plain run it must do under speculation.

At temperature 0 a plain and a speculative run give the same tokens, so texts are compared; elsewhere distributions.
What is not honoured is in `REFUSED_PARAMETERS` and `REFUSED_WITH_ADAPTIVE_LENGTHS`, and this file says so too.
"""

import re

import pytest
import torch
from tests.lossless.lossless_tools import (
    SIGNIFICANCE,
    VOCAB_SIZE,
    eagle3,
    in_turn,
    rollout_p_value,
    sequence_p_value,
    sequence_probabilities,
)
from tests.tolerance import logprob_tolerance

from tlt_trl.generation.canary import exact_probabilities
from tlt_trl.generation.rollout_loop import RolloutLoop
from tlt_trl.generation.sampling_parameters import (
    REFUSED_PARAMETERS,
    REFUSED_WITH_ADAPTIVE_LENGTHS,
    why_inexact,
)
from tlt_trl.strategy import Strategy, make_selector


pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

EOS = 2
PROMPTS = [[4 + i % 28, 4 + 5 * i % 28, 9, 10] for i in range(48)]
LENGTH = 24


def observed(output) -> tuple:
    """All that a caller sees of one completion, but for log-probs."""
    return tuple(output.token_ids), output.text, output.finish_reason, output.stop_reason


def assert_same_as_plain(under_test, prompts=PROMPTS, **params):
    """Greedy completions with 0, 1, 3 and 5 draft tokens are the same; returns those of the plain run."""
    params = {"temperature": 0.0, "max_tokens": LENGTH, "detokenize": True} | params
    plain = [observed(output.outputs[0]) for output in under_test.rollout(prompts, "off", **params).outputs]
    for strategy in ("eagle3 x1", "eagle3 x3 probabilistic", "eagle3 x5"):
        rollout = under_test.rollout(prompts, strategy, **params)
        assert [observed(output.outputs[0]) for output in rollout.outputs] == plain
    return plain


def counts_before(ids, start):
    """How often each token occurs in `ids[:, start:t]` for every t from `start` on; shape (batch, length, vocab)."""
    one_hot = torch.nn.functional.one_hot(ids, VOCAB_SIZE)
    return one_hot[:, start:].cumsum(1) - one_hot[:, start:]


# ---- changes of the distribution ------------------------------------------------------------------------------------


def penalise(presence=0.0, frequency=0.0, repetition=1.0):
    """The logits that penalties make, written down from their definition."""

    def adjust(logits, ids, prompt_length):
        in_answer = counts_before(ids, prompt_length)
        in_prompt = torch.nn.functional.one_hot(ids[:, :prompt_length], VOCAB_SIZE).sum(1, keepdim=True)
        seen = (in_answer + in_prompt) > 0
        factor = torch.where(seen, repetition, 1.0)
        logits = torch.where(logits > 0, logits / factor, logits * factor)
        return logits - presence * (in_answer > 0) - frequency * in_answer

    return adjust


@pytest.mark.parametrize(
    ("params", "penalties"),
    [
        ({"presence_penalty": 1.5}, {"presence": 1.5}),
        ({"frequency_penalty": 0.8}, {"frequency": 0.8}),
        ({"repetition_penalty": 1.5}, {"repetition": 1.5}),
    ],
)
def test_penalties(under_test, params, penalties):
    plain = assert_same_as_plain(under_test, **params)
    unpenalised = under_test.rollout(PROMPTS, "off", temperature=0.0, max_tokens=LENGTH).token_ids
    assert [list(tokens) for tokens, *_ in plain] != unpenalised
    prompts = PROMPTS * 4
    rollout = under_test.rollout(prompts, "eagle3 x3 probabilistic", temperature=1.0, max_tokens=64, **params)
    p_value = rollout_p_value(
        under_test.policy, prompts, rollout.token_ids, adjust=penalise(**penalties), temperature=1.0
    )
    assert p_value > SIGNIFICANCE
    assert rollout_p_value(under_test.policy, prompts, rollout.token_ids, temperature=1.0) < SIGNIFICANCE


def test_penalties_of_some_requests_only(under_test):
    # Requests with and without penalties, of changing draft lengths, share one batch.
    own = [{"frequency_penalty": 0.8} if i % 2 else {} for i in range(192)]
    strategies, prompts = in_turn(*(eagle3(length, "probabilistic") for length in (3, 0, 5, 1))), PROMPTS * 4
    tokens = under_test.rollout(prompts, strategies, params_by_prompt=own, temperature=1.0, max_tokens=64).token_ids
    for first, adjust in [(0, penalise()), (1, penalise(frequency=0.8))]:
        p_value = rollout_p_value(under_test.policy, prompts[first::2], tokens[first::2], adjust, temperature=1.0)
        assert p_value > SIGNIFICANCE


def test_bad_words(under_test):
    # w5 and w11 are what the policy likes best; the third is forbidden only after w20.
    plain = assert_same_as_plain(under_test, bad_words=["w5", "w11", "w20 w20"])
    assert all(5 not in tokens and 11 not in tokens for tokens, *_ in plain)

    def forbid(logits, ids, prompt_length):
        logits[..., [5, 11]] = -torch.inf
        return logits

    prompts = PROMPTS * 4
    tokens = under_test.rollout(
        prompts, "eagle3 x3 probabilistic", temperature=1.0, max_tokens=64, bad_words=["w5", "w11"], detokenize=True
    ).token_ids
    assert rollout_p_value(under_test.policy, prompts, tokens, adjust=forbid, temperature=1.0) > SIGNIFICANCE


def test_allowed_token_ids(under_test):
    allowed = list(range(6, 20))
    plain = assert_same_as_plain(under_test, allowed_token_ids=allowed)
    assert {token for tokens, *_ in plain for token in tokens} <= set(allowed)


def keep_likely(logits, ids, prompt_length):
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < 0.1 * probabilities.amax(-1, keepdim=True), -torch.inf)


def prefer_and_avoid(logits, ids, prompt_length):
    logits[..., 7] += 2.0
    logits[..., 5] -= 1.0
    return logits


@pytest.mark.parametrize(
    ("name", "value", "adjust"),
    [("min_p", 0.1, keep_likely), ("logit_bias", {7: 2.0, 5: -1.0}, prefer_and_avoid)],
)
def test_what_cannot_be_applied_to_drafts_makes_steps_plain(under_test, name, value, adjust):
    # More requests than run at once: those with the parameter come in while drafts of the others are verified.
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(800)]
    own = [{name: value} if i >= 560 else {} for i in range(len(prompts))]
    rollout = under_test.rollout(prompts, "eagle3 x3", params_by_prompt=own, temperature=1.0, max_tokens=LENGTH)
    assert rollout.drafts > 0
    for group, own_adjust, other in ((slice(560), penalise(), adjust), (slice(560, None), adjust, penalise())):
        mine, tokens = prompts[group], rollout.token_ids[group]
        assert rollout_p_value(under_test.policy, mine, tokens, own_adjust, temperature=1.0) > SIGNIFICANCE
        assert rollout_p_value(under_test.policy, mine, tokens, other, temperature=1.0) < SIGNIFICANCE
    assert name in REFUSED_PARAMETERS
    reason = why_inexact({name: value})
    assert reason.startswith(f"`{name}={value}`") and "use `" in reason
    assert why_inexact({name: None, "temperature": 1.0}) is None
    assert why_inexact({name: type(value)()}) is None


# ---- seeds and several samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_seeded_requests_follow_the_policy(under_test, drafts):
    exact = sequence_probabilities(under_test.policy, PROMPTS[0], 3, temperature=1.0)
    own = [{"seed": i} for i in range(4000)]
    rollout = under_test.rollout(
        [PROMPTS[0]] * len(own), eagle3(2, drafts), params_by_prompt=own, temperature=1.0, max_tokens=3
    )
    assert sequence_p_value(rollout.token_ids, exact) > SIGNIFICANCE


def test_seeds_are_reproducible_with_a_fixed_draft_length(under_test):
    def run(prompts, **params):
        return under_test.rollout(prompts, "eagle3 x3", temperature=1.0, max_tokens=LENGTH, **params).token_ids

    # Neither the global random state nor the company of other requests matters.
    first = run(PROMPTS[:8], params_by_prompt=[{"seed": i} for i in range(8)], seed=1)
    second = run(PROMPTS[:16], params_by_prompt=[{"seed": i} for i in range(8)] + [{}] * 8, seed=2)
    other = run(PROMPTS[:8], params_by_prompt=[{"seed": 100 + i} for i in range(8)], seed=1)
    assert first == second[:8]
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_seeds_are_not_reproducible_when_the_draft_length_changes(under_test):
    # Why they are refused with an adaptive selector: the number of random draws depends on the draft length.
    own = [{"seed": i} for i in range(8)]
    runs = [
        under_test.rollout(PROMPTS[:8], eagle3(k), params_by_prompt=own, temperature=1.0, max_tokens=LENGTH).token_ids
        for k in (1, 3)
    ]
    assert runs[0] != runs[1]
    assert "seed" in REFUSED_WITH_ADAPTIVE_LENGTHS
    assert "`seed=0`" in why_inexact({"seed": 0}, adaptive=True)
    assert why_inexact({"seed": 0}, adaptive=False) is None


def test_several_samples_per_request(under_test):
    def run(seed):
        rollout = under_test.rollout(PROMPTS[:8], "eagle3 x3", temperature=1.0, max_tokens=LENGTH, n=4, seed=seed)
        return [[tuple(sample.token_ids) for sample in output.outputs] for output in rollout.outputs]

    samples = run(0)
    assert all(len(group) == len(set(group)) == 4 for group in samples)

    rollouts = [
        under_test.rollout(
            PROMPTS[:8], "eagle3 x3", temperature=1.0, max_tokens=LENGTH, n=4, seed=seed, params_by_prompt=own
        )
        for seed, own in [(1, [{"seed": 7}] * 8), (2, [{"seed": 7}] * 8)]
    ]
    seeded = [[[tuple(s.token_ids) for s in output.outputs] for output in r.outputs] for r in rollouts]
    assert seeded[0] == seeded[1]
    assert all(len(set(group)) == 4 for group in seeded[0])


def test_several_samples_per_request_follow_the_policy(under_test):
    exact = sequence_probabilities(under_test.policy, PROMPTS[0], 2, temperature=1.0)
    rollout = under_test.rollout([PROMPTS[0]] * 250, "eagle3 x1 probabilistic", temperature=1.0, max_tokens=2, n=16)
    tokens = [list(sample.token_ids) for output in rollout.outputs for sample in output.outputs]
    assert sequence_p_value(tokens, exact) > SIGNIFICANCE


def test_several_samples_per_request_through_the_rollout_loop(under_test):
    from vllm import SamplingParams

    llm, engine = under_test.llm, under_test.engine
    llm.rollout_loop = RolloutLoop(engine, make_selector("fixed", [Strategy("eagle3", 3, "greedy")], 512))
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in PROMPTS],
            SamplingParams(n=3, max_tokens=8, temperature=1.0, ignore_eos=True),
            use_tqdm=False,
        )
    finally:
        llm.rollout_loop = None
    assert [list(output.prompt_token_ids) for output in outputs] == PROMPTS
    assert all([len(sample.token_ids) for sample in output.outputs] == [8, 8, 8] for output in outputs)


# ---- where a completion ends ----------------------------------------------------------------------------------------


def test_max_tokens(under_test):
    for max_tokens in (1, 2, 3, 7):
        plain = assert_same_as_plain(under_test, max_tokens=max_tokens)
        assert all(len(tokens) == max_tokens and reason == "length" for tokens, _, reason, _ in plain)


def test_max_tokens_one_follows_the_policy(under_test):
    exact = sequence_probabilities(under_test.policy, PROMPTS[0], 1, temperature=0.7)
    rollout = under_test.rollout([PROMPTS[0]] * 4000, "eagle3 x5 probabilistic", temperature=0.7, max_tokens=1)
    assert sequence_p_value(rollout.token_ids, exact) > SIGNIFICANCE


def test_stop_token_ids_inside_an_accepted_draft(under_test):
    # w5 is drafted and accepted all the time.
    plain = assert_same_as_plain(under_test, stop_token_ids=[5, 20])
    stopped = [tokens for tokens, _, reason, _ in plain if reason == "stop"]
    assert len(stopped) > len(PROMPTS) / 2
    assert all(tokens[-1] in (5, 20) and not {5, 20} & set(tokens[:-1]) for tokens in stopped)
    assert any(len(tokens) > 1 for tokens in stopped)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_leave_no_extra_tokens(under_test, include):
    plain = assert_same_as_plain(under_test, stop=["w5 w11", "w20"], include_stop_str_in_output=include)
    stopped = [(tokens, text, reason) for tokens, text, _, reason in plain if isinstance(reason, str)]
    assert stopped
    for tokens, text, stop in stopped:
        assert text.endswith(stop) if include else stop not in text
        # The tokens of a stop string stay, those drafted after it must not.
        words = " ".join(f"w{t}" for t in tokens)
        assert words.endswith(stop) and words.count(stop) == 1


def test_stop_strings_under_sampling(under_test):
    params = {"temperature": 1.0, "max_tokens": 64, "detokenize": True, "stop": ["w20"]}
    rollout = under_test.rollout(PROMPTS, "eagle3 x5 probabilistic", **params)
    ended = [output.outputs[0] for output in rollout.outputs if output.outputs[0].finish_reason == "stop"]
    assert len(ended) > len(PROMPTS) / 2
    assert all(list(o.token_ids).index(20) == len(o.token_ids) - 1 for o in ended)


def test_stop_strings_with_logprobs(under_test):
    params = {"temperature": 1.0, "max_tokens": 64, "detokenize": True, "stop": ["w20", "w11"]}
    for output in under_test.rollout(PROMPTS, "eagle3 x5 probabilistic", logprobs=0, n=2, **params).outputs:
        for sample in output.outputs:
            assert len(sample.logprobs) == len(sample.token_ids)
            assert all(token in given for token, given in zip(sample.token_ids, sample.logprobs, strict=True))
            assert not {20, 11} & set(sample.token_ids[:-1])


def test_end_of_sequence_and_ignore_eos(under_test):
    params = {"temperature": 1.0, "max_tokens": 64}
    prompts = PROMPTS * 4
    rollout = under_test.rollout(prompts, "eagle3 x5 probabilistic", ignore_eos=False, **params)
    ended = [ids for ids in rollout.token_ids if EOS in ids]
    assert ended
    assert all(ids.index(EOS) == len(ids) - 1 for ids in ended)
    assert all(len(ids) == 64 for ids in rollout.token_ids if EOS not in ids)
    ignoring = under_test.rollout(prompts, "eagle3 x5 probabilistic", ignore_eos=True, **params).token_ids
    assert all(len(ids) == 64 for ids in ignoring)
    assert any(EOS in ids[:-1] for ids in ignoring)


def test_ends_follow_the_policy(under_test):
    exact = sequence_probabilities(under_test.policy, PROMPTS[0], 2, temperature=1.0, top_k=20).view(VOCAB_SIZE, -1)
    stop = exact.sum(1).argmax().item()
    tokens = under_test.rollout(
        [PROMPTS[0]] * 4000, "eagle3 x2 probabilistic", temperature=1.0, top_k=20, max_tokens=2, stop_token_ids=[stop]
    ).token_ids
    share = sum(ids == [stop] for ids in tokens) / len(tokens)
    expected = exact[stop].sum().item()
    assert abs(share - expected) < 5 * (expected * (1 - expected) / len(tokens)) ** 0.5
    assert all(len(ids) == 2 for ids in tokens if ids[0] != stop)


# ---- what comes with the tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 4])
def test_logprobs(under_test, number):
    sampling = {"temperature": 0.7, "top_p": 0.9}
    limit = logprob_tolerance(sampling["temperature"])
    rollout = under_test.rollout(PROMPTS, "eagle3 x3 probabilistic", max_tokens=LENGTH, logprobs=number, **sampling)
    for prompt, output in zip(PROMPTS[:8], rollout.outputs[:8], strict=True):
        sample = output.outputs[0]
        ids = torch.tensor([prompt + list(sample.token_ids)])
        with torch.no_grad():
            logits = under_test.policy(ids).logits[0, len(prompt) - 1 : -1]
        exact = exact_probabilities(logits, **sampling).log()
        assert len(sample.logprobs) == len(sample.token_ids)
        for token, given, wanted in zip(sample.token_ids, sample.logprobs, exact, strict=True):
            # The sampled token comes on top where it is not among the best.
            assert max(1, number) <= len(given) <= number + 1
            assert given[token].logprob == pytest.approx(wanted[token].item(), abs=limit)
            best = sorted((entry.logprob for t, entry in given.items() if entry.rank <= number), reverse=True)
            assert best == pytest.approx(wanted.topk(number).values[: len(best)].tolist(), abs=limit)


@pytest.mark.parametrize(
    ("kind", "constraint", "pattern"),
    [
        ("regex", r"w(5|7)(w(6|9|12)){3}", r"w(5|7)(w(6|9|12)){3}"),
        ("choice", ["w6w7w8", "w6w9", "w11"], "w6w7w8|w6w9|w11"),
    ],
)
def test_structured_outputs(under_test, kind, constraint, pattern):
    from vllm.sampling_params import StructuredOutputsParams

    params = {"max_tokens": 12, "detokenize": True, "ignore_eos": False}
    params["structured_outputs"] = StructuredOutputsParams(**{kind: constraint})
    for drafts in ("greedy", "probabilistic"):
        rollout = under_test.rollout(PROMPTS, eagle3(3, drafts), temperature=1.0, **params)
        texts = ["".join(output.outputs[0].text.split()) for output in rollout.outputs]
        assert all(re.fullmatch(pattern, text) for text in texts), texts
        assert all(output.outputs[0].finish_reason == "stop" for output in rollout.outputs)
    assert_same_as_plain(under_test, **params)


def test_temperature_top_p_and_top_k_together(under_test):
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 8}
    prompts = PROMPTS * 4
    tokens = under_test.rollout(prompts, "eagle3 x3 probabilistic", max_tokens=64, **sampling).token_ids
    assert rollout_p_value(under_test.policy, prompts, tokens, **sampling) > SIGNIFICANCE
