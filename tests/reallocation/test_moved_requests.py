"""Samples that leave the engine and go on in it follow the policy's distribution; log-probs and order stay."""

import itertools

import pytest
import torch
from tests.lossless.lossless_tools import (
    SIGNIFICANCE,
    VOCAB_SIZE,
    rollout_p_value,
    sequence_p_value,
    sequence_probabilities,
)
from tests.tolerance import logprob_tolerance

from tlt_trl.generation.rollout_loop import RolloutLoop
from tlt_trl.strategy import Strategy, make_selector


pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

PROMPT = [5, 6, 7, 8]


class MovesInPlace:
    """Takes every sample out of the engine before every k-th step, and goes on with it in the same engine."""

    holds_back = False

    def __init__(self, engine, every):
        self.requests, self.every = engine.requests, every
        self.samples, self.moves, self.steps, self.names = {}, 0, 0, itertools.count()

    def between_steps(self):
        self.steps += 1
        if self.steps % self.every == 0:
            for request in self.requests.running():
                if request.can_move:
                    self.move(request.request_id)
        return []

    def move(self, request_id):
        sample = self.requests.take_out(request_id)
        if request_id in self.samples:
            earlier = self.samples.pop(request_id)
            sample = earlier.followed_by(sample.token_ids, sample.logprobs, sample.cumulative_logprob)
        name = f"moved {next(self.names)}"
        self.samples[name] = sample
        self.requests.go_on(name, sample)
        self.moves += 1

    def keep_own(self, finished):
        return [self.whole(output) if output.request_id in self.samples else output for output in finished]

    def whole(self, output):
        sample, (last,) = self.samples.pop(output.request_id), output.outputs
        sample = sample.followed_by(list(last.token_ids), last.logprobs, last.cumulative_logprob)
        return self.requests.whole_output(sample, last.finish_reason, last.stop_reason)

    def observe(self, step):
        pass


def generate(under_test, prompts, every, strategy="eagle3 x3", params_by_prompt=None, **params):
    """Finished requests and the mover."""
    from vllm import SamplingParams

    loop = RolloutLoop(under_test.engine, make_selector("fixed", [Strategy.parse(strategy)], 512))
    loop.mover = MovesInPlace(under_test.engine, every)
    under_test.llm.rollout_loop = loop
    torch.manual_seed(0)
    defaults = {"temperature": 1.0, "detokenize": False, "ignore_eos": True} | params
    own = params_by_prompt or [{}] * len(prompts)
    try:
        outputs = under_test.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            [SamplingParams(**(defaults | o)) for o in own],
            use_tqdm=False,
        )
    finally:
        under_test.llm.rollout_loop = None
    return outputs, loop.mover


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def spread_prompts(number):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(4, VOCAB_SIZE, (number, len(PROMPT)), generator=generator).tolist()


@pytest.mark.parametrize(
    ("strategy", "every", "sampling"),
    [
        ("eagle3 x3", 1, {}),
        ("eagle3 x3", 3, {"temperature": 0.7, "top_p": 0.9}),
        ("eagle3 x5 probabilistic", 2, {"top_k": 20}),
        pytest.param("eagle3 x1", 5, {}, marks=pytest.mark.slow),
        pytest.param("ngram x4", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_every_token_follows_the_policy(under_test, strategy, every, sampling):
    prompts, sampling = spread_prompts(320), {"temperature": 1.0} | sampling
    outputs, mover = generate(under_test, prompts, every, strategy, max_tokens=40, **sampling)
    assert mover.moves > 320 * 2
    assert rollout_p_value(under_test.policy, prompts, tokens(outputs), **sampling) > SIGNIFICANCE


def test_whole_sequences_follow_the_enumerated_distribution(under_test):
    exact = sequence_probabilities(under_test.policy, PROMPT, 3, temperature=1.0)
    outputs, mover = generate(under_test, [PROMPT] * 5000, 2, max_tokens=3)
    assert mover.moves > 5000
    assert sequence_p_value(tokens(outputs), exact) > SIGNIFICANCE


def test_the_statistics_would_catch_a_lost_token(under_test, monkeypatch):
    requests = under_test.engine.requests
    go_on = requests.go_on

    def forgetful(name, sample):
        last = sample.token_ids[-1:]
        sample.token_ids = sample.token_ids[:-1]  # the next one is sampled without it
        go_on(name, sample)
        sample.token_ids += last

    monkeypatch.setattr(requests, "go_on", forgetful)
    prompts = spread_prompts(960)
    outputs, _ = generate(under_test, prompts, 3, max_tokens=40)
    cut = [row[:36] for row in tokens(outputs)]
    assert rollout_p_value(under_test.policy, prompts, cut, temperature=1.0) < SIGNIFICANCE


def test_a_repetition_penalty_counts_the_tokens_before_the_move(under_test):
    def penalise(logits, ids, prompt_length):
        logits = logits.clone()
        for row in range(len(ids)):
            for position in range(logits.shape[1]):
                seen = ids[row, : prompt_length + position].unique()
                scores = logits[row, position, seen]
                logits[row, position, seen] = torch.where(scores > 0, scores / 1.5, scores * 1.5)
        return logits

    prompts = spread_prompts(200)
    outputs, mover = generate(under_test, prompts, 3, max_tokens=20, repetition_penalty=1.5)
    assert mover.moves > 200
    args = under_test.policy, prompts, tokens(outputs)
    assert rollout_p_value(*args, penalise, temperature=1.0) > SIGNIFICANCE
    assert rollout_p_value(*args, temperature=1.0) < SIGNIFICANCE


def test_log_probs_order_and_budget_stay(under_test):
    prompts = spread_prompts(24)
    own = [{"max_tokens": 5 + 3 * (n % 5)} for n in range(24)]
    outputs, _ = generate(under_test, prompts, 2, params_by_prompt=own, logprobs=0)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(row) for row in tokens(outputs)] == [params["max_tokens"] for params in own]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        ids = torch.tensor([prompt + list(completion.token_ids)])
        with torch.no_grad():
            expected = under_test.policy(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        expected = expected.gather(-1, ids[0, len(prompt) :, None])[:, 0]
        returned = torch.tensor(
            [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        )
        assert (expected - returned).abs().max() < logprob_tolerance()
        assert abs(completion.cumulative_logprob - returned.sum()) < len(returned) * logprob_tolerance()


def test_greedy_text_is_the_one_of_samples_that_stay(under_test):
    prompts = spread_prompts(16)
    moved, mover = generate(under_test, prompts, 2, max_tokens=30, temperature=0.0, detokenize=True)
    stayed, other = generate(under_test, prompts, 10_000, max_tokens=30, temperature=0.0, detokenize=True)
    assert mover.moves > 16 and other.moves == 0
    assert tokens(moved) == tokens(stayed)
    assert [output.outputs[0].text for output in moved] == [output.outputs[0].text for output in stayed]


def test_an_end_of_sequence_ends_a_moved_sample(under_test):
    outputs, mover = generate(under_test, spread_prompts(64), 2, max_tokens=60, ignore_eos=False, stop_token_ids=[5])
    assert mover.moves > 30
    for row in tokens(outputs):
        assert len(row) == 60 or row[-1] in (2, 5)
        assert not {2, 5} & set(row[:-1])


@pytest.mark.parametrize(
    "params",
    [
        {"seed": 3},
        {"stop": ["w7"], "detokenize": True},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"bad_words": ["w7"], "detokenize": True},
        {"n": 2},
        {"prompt_logprobs": 1},
    ],
    ids=str,
)
def test_what_would_not_be_exact_stays(under_test, params):
    outputs, mover = generate(under_test, spread_prompts(2), 1, max_tokens=8, **params)
    assert mover.moves == 0 and len(outputs) == 2
