"""One real engine on a tiny policy: stepping, weight sync, and steps without draft tokens."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from tests.conftest import save_tiny_policy
from transformers import AutoModelForCausalLM

from tlt_trl.drafter.modeling_drafter import Drafter
from tlt_trl.generation.engine import RolloutEngine
from tlt_trl.generation.lookup import LookupDrafter
from tlt_trl.generation.rollout_loop import RolloutLoop
from tlt_trl.generation.standalone import build_llm, completion_ids
from tlt_trl.strategy import Strategy, make_selector
from tlt_trl.vllm_internals import weights
from tlt_trl.vllm_internals.weights import WeightMismatchError


pytestmark = pytest.mark.engine
PROMPTS = [[1, 5, 6, 7], [1, 9, 10], [1, 20, 21, 22, 23]]


class Setup:
    def __init__(self, folder):
        directory = save_tiny_policy(folder / "policy")
        self.policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.drafter = Drafter.from_policy(self.policy, torch.arange(0, 64, 2))
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            for parameter in self.drafter.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        self.drafter.save_pretrained(folder / "drafter")
        self.llm = build_llm(
            directory,
            drafter=str(folder / "drafter"),
            max_num_seqs=4,
            max_model_len=128,
            enforce_eager=True,
            kv_cache_memory_bytes=2**26,
            dtype="float32",
        )
        self.engine = RolloutEngine(self.llm)

    def generate(self, choose, prompts=PROMPTS, max_tokens=40):
        """Greedy completions and, for every step, the draft tokens that it verified."""
        verified = []
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def record(*args, **kwargs):
            output = schedule(*args, **kwargs)
            if output.num_scheduled_tokens:
                verified.append(sorted(map(tuple, output.scheduled_spec_decode_tokens.values())))
            return output

        scheduler.schedule = record
        self.engine.choose = choose
        try:
            completions = completion_ids(self.llm, prompts, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        finally:
            scheduler.schedule = schedule
        return completions, verified

    def reference(self, prompts=PROMPTS, max_tokens=40):
        return [
            self.policy.generate(
                torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=3
            )[0, len(ids) :].tolist()
            for ids in prompts
        ]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return Setup(tmp_path_factory.mktemp("engine"))


def always(num_draft_tokens, method="eagle3"):
    strategy = Strategy(method, num_draft_tokens) if num_draft_tokens else Strategy.off()
    return lambda batch_size: strategy


def in_turn(phases):
    """Strategies of `(steps, strategy)`, round and round."""
    turns = itertools.cycle([Strategy.parse(text) for steps, text in phases for _ in range(steps)])
    return lambda batch_size: next(turns)


def alternating(period):
    return in_turn([(period, "off"), (period, "eagle3 x3")])


@contextmanager
def drafter_in_every_step(engine):
    """vLLM's own way: the drafter runs in steps without draft tokens too."""
    engine.proposer.can_defer = False
    try:
        yield
    finally:
        engine.proposer.can_defer = True


def push_moved_policy(setup, seed):
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in setup.policy.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    setup.engine.push_policy(setup.policy.named_parameters())
    setup.engine.push_drafter(setup.drafter.vllm_weights())
    setup.engine.reset_prefix_cache()


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 5])
def test_greedy_text_is_the_policys(setup, num_draft_tokens):
    completions, verified = setup.generate(always(num_draft_tokens))
    assert completions == setup.reference()
    assert max(len(tokens) for step in verified for tokens in step or [()]) == num_draft_tokens


def test_the_choice_sees_the_batch_of_its_own_step(setup):
    asked = []
    setup.generate(
        lambda batch_size: asked.append(batch_size) or Strategy("eagle3", 1), prompts=PROMPTS * 2, max_tokens=6
    )
    # Four of the six run at once; the last two are admitted when the first have finished.
    assert asked[0] == 4 and asked[-1] == 2 and set(asked) <= {4, 2, 6}


def test_drafts_after_steps_without_are_those_of_an_engine_that_never_skipped(setup):
    completions, skipping = setup.generate(alternating(5))
    assert setup.engine.proposer.num_deferred_tokens > 0 or any(skipping)
    with drafter_in_every_step(setup.engine):
        setup.engine.reset_prefix_cache()
        same, running = setup.generate(alternating(5))
    assert completions == same == setup.reference()
    assert skipping == running
    assert sum(map(len, skipping)) > 20


def test_without_catching_up_the_drafts_would_differ(setup, monkeypatch):
    # The test above can fail: keys and values that are never written change what is drafted.
    setup.engine.reset_prefix_cache()
    _, right = setup.generate(alternating(5))
    setup.engine.reset_prefix_cache()
    monkeypatch.setattr(setup.engine.proposer, "catch_up", setup.engine.proposer.discard)
    completions, wrong = setup.generate(alternating(5))
    assert wrong != right
    assert completions == setup.reference()


@pytest.mark.parametrize("seed", [1, 2])
def test_pushed_policy_is_the_one_that_samples(setup, seed):
    push_moved_policy(setup, seed)
    assert torch.equal(setup.engine.weights.policy_embedding[:64], setup.policy.get_input_embeddings().weight)
    assert setup.engine.weights.drafter_embedding.data_ptr() == setup.engine.weights.policy_embedding.data_ptr()
    assert setup.generate(always(3))[0] == setup.reference()


def test_syncing_twice_changes_nothing(setup):
    push_moved_policy(setup, 3)
    once = setup.generate(always(3))
    setup.engine.push_policy(setup.policy.named_parameters())
    setup.engine.push_drafter(setup.drafter.vllm_weights())
    setup.engine.reset_prefix_cache()
    assert setup.generate(always(3)) == once


def test_stale_packed_head_is_caught(setup, monkeypatch):
    # vLLM's reload leaves the packed copy of a tied head as it was; see `repack_tied_head`.
    monkeypatch.setattr(weights, "repack_tied_head", lambda model: None)
    with pytest.raises(WeightMismatchError, match="lm_head"):
        push_moved_policy(setup, 4)
    monkeypatch.undo()
    push_moved_policy(setup, 4)
    assert setup.generate(always(3))[0] == setup.reference()


def test_pushed_drafter_is_the_one_that_drafts(setup):
    push_moved_policy(setup, 5)
    _, before = setup.generate(always(3))
    moved = Drafter.from_policy(setup.policy, torch.arange(1, 64, 2))
    setup.engine.push_drafter(moved.vllm_weights())
    setup.engine.reset_prefix_cache()
    completions, after = setup.generate(always(3))
    assert completions == setup.reference()
    # The new one's vocabulary is the odd tokens, the old one's the even.
    assert {token % 2 for step in before for tokens in step for token in tokens} == {0}
    assert {token % 2 for step in after for tokens in step for token in tokens} == {1}
    setup.engine.push_drafter(setup.drafter.vllm_weights())


def test_drafter_with_an_embedding_is_refused(setup):
    with pytest.raises(ValueError, match="shares the policy's embedding"):
        setup.engine.push_drafter([("embed_tokens.weight", torch.zeros(64, 64))])


def test_another_drafter_in_the_engine_is_caught(setup, monkeypatch):
    pushed = dict(setup.drafter.vllm_weights())
    load = setup.engine.weights.drafter.load_weights
    zeros = {name: tensor.clone() for name, tensor in pushed.items()}
    zeros["fc.weight"].zero_()
    monkeypatch.setattr(setup.engine.weights.drafter, "load_weights", lambda items: load(zeros.items()))
    with pytest.raises(WeightMismatchError, match="fc.weight"):
        setup.engine.push_drafter(pushed.items())
    monkeypatch.undo()
    setup.engine.push_drafter(pushed.items())


def test_steps_report_what_they_did(setup):
    setup.engine.choose = always(2)
    from vllm import SamplingParams

    setup.llm.enqueue(
        [{"prompt_token_ids": ids} for ids in PROMPTS], SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False
    )
    steps = []
    while setup.engine.has_unfinished_requests():
        _, step = setup.engine.step()
        steps.append(step)
    assert steps[0].has_prefill and (steps[0].verified, steps[0].proposed) == (Strategy.off(), Strategy("eagle3", 2))
    assert steps[1].verified == steps[1].proposed == Strategy("eagle3", 2)
    assert not steps[1].has_prefill and steps[1].num_verified == 2 and steps[1].batch_size == 3
    assert steps[1].draft_tokens == 6 and steps[1].drafts == 3
    for step in steps:
        assert step.batch_size <= step.emitted_tokens <= step.batch_size + sum(step.accepted_by_position)
        assert step.seconds > 0
    assert steps[1].emitted_tokens == steps[1].batch_size + sum(steps[1].accepted_by_position)
    # Not what was accepted behind the ninth token.
    assert sum(step.emitted_tokens for step in steps) == 27


def remember_nearly_right_answers(setup, num_tokens=80):
    """Starts the lookup anew, with earlier answers in which every seventh token is another one."""
    setup.engine.lookup = LookupDrafter()
    for prompt, answer in zip(PROMPTS, setup.reference(max_tokens=num_tokens), strict=True):
        wrong = [(token + 1) % 64 if position % 7 == 6 else token for position, token in enumerate(answer)]
        setup.engine.lookup.remember(prompt, wrong)
    setup.engine.reset_prefix_cache()


@pytest.fixture()
def looked_up(setup):
    remember_nearly_right_answers(setup)
    return setup


def test_greedy_text_with_looked_up_tokens_is_the_policys(looked_up):
    completions, verified = looked_up.generate(always(4, "ngram"))
    assert completions == looked_up.reference()
    assert len(verified) < 25  # 40 tokens without a draft accepted
    assert {len(tokens) for step in verified for tokens in step} >= {4}
    assert any(len(step) < 3 for step in verified[1:])  # requests without a match have no drafts


def test_lookup_and_drafter_take_turns(looked_up):
    phases = [(6, "ngram x4"), (5, "eagle3 x3"), (3, "off")]
    completions, deferring = looked_up.generate(in_turn(phases), max_tokens=80)

    # Without deferral vLLM runs the drafter in every step; the drafts must be the same, rejected tokens or not.
    remember_nearly_right_answers(looked_up)
    with drafter_in_every_step(looked_up.engine):
        same, running = looked_up.generate(in_turn(phases), max_tokens=80)
    assert completions == same == looked_up.reference(max_tokens=80)
    assert deferring == running


@pytest.mark.parametrize("strategy", ["off", "eagle3 x5", "ngram x5"])
def test_rollout_that_runs_into_the_context_limit(looked_up, strategy):
    completions, _ = looked_up.generate(in_turn([(1, strategy)]), max_tokens=500)
    assert [len(ids) + len(tokens) for ids, tokens in zip(PROMPTS, completions, strict=True)] == [128] * 3
    assert completions == [
        tokens[: 128 - len(ids)] for ids, tokens in zip(PROMPTS, looked_up.reference(max_tokens=125), strict=True)
    ]


def test_answers_that_were_looked_up_for_are_kept_once(looked_up):
    strategies = [Strategy("ngram", 4)]
    looked_up.llm.rollout_loop = RolloutLoop(looked_up.engine, make_selector("fixed", strategies, 4))
    try:
        completions = completion_ids(looked_up.llm, PROMPTS * 2, temperature=1.0, max_tokens=30, ignore_eos=True)
    finally:
        looked_up.llm.rollout_loop = None
    assert looked_up.engine.lookup.num_running == 0
    # Each prompt once, and each answer behind the last four tokens of its prompt.
    tails = sum(2 * min(len(prompt), 4) for prompt in PROMPTS)
    expected = sum(map(len, PROMPTS)) + tails + sum(map(len, completions))
    assert looked_up.engine.lookup.num_tokens == expected


def test_a_push_brings_its_own_mapping_of_draft_tokens(setup):
    other = Drafter.from_policy(setup.policy, torch.arange(1, 64, 2))

    def parities():
        _, verified = setup.generate(always(3))
        return {token % 2 for step in verified for tokens in step for token in tokens}

    assert parities() == {0}
    try:
        setup.engine.push_drafter(other.vllm_weights())
        assert parities() == {1}
        with pytest.raises(WeightMismatchError, match="d2t"):
            weights.check_mapping(setup.engine.weights.drafter, dict(setup.drafter.vllm_weights()))
    finally:
        setup.engine.push_drafter(setup.drafter.vllm_weights())
    assert parities() == {0}
