"""One real engine on a tiny policy: stepping, weight sync, and steps without draft tokens."""

import pytest
import torch
from tests.conftest import save_tiny_policy
from transformers import AutoModelForCausalLM

from tlt_trl.drafter.checkpoint import save_drafter
from tlt_trl.drafter.modeling_drafter import Drafter
from tlt_trl.generation.engine import RolloutEngine, WeightMismatchError
from tlt_trl.generation.lookup import NgramDrafter
from tlt_trl.generation.rollout_loop import RolloutLoop
from tlt_trl.generation.standalone import build_llm, completion_ids
from tlt_trl.strategy import Strategy, make_selector


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
        save_drafter(self.drafter, folder / "drafter", {})
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
        read_step = self.engine._read_step

        def record(scheduler_output, model_runner_output):
            verified.append(sorted(map(tuple, scheduler_output.scheduled_spec_decode_tokens.values())))
            return read_step(scheduler_output, model_runner_output)

        self.engine._read_step = record
        self.engine.schedule.choose = choose
        try:
            completions = completion_ids(self.llm, prompts, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        finally:
            self.engine._read_step = read_step
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


def alternating(period):
    """Off and three draft tokens by turns."""
    calls = iter(range(10**6))
    return lambda batch_size: 3 * (next(calls) // period % 2)


def push_moved_policy(setup, seed):
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in setup.policy.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    setup.engine.push_target(setup.policy.named_parameters())
    setup.engine.push_drafter(setup.drafter.vllm_weights())
    setup.engine.reset_prefix_cache()


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 5])
def test_greedy_text_is_the_policys(setup, num_draft_tokens):
    completions, verified = setup.generate(lambda batch_size: num_draft_tokens)
    assert completions == setup.reference()
    assert max(len(tokens) for step in verified for tokens in step or [()]) == num_draft_tokens


def test_the_choice_sees_the_batch_of_its_own_step(setup):
    asked = []
    setup.generate(lambda batch_size: asked.append(batch_size) or 1, prompts=PROMPTS * 2, max_tokens=6)
    # Four of the six run at once; the last two are admitted when the first have finished.
    assert asked[0] == 4 and asked[-1] == 2 and set(asked) <= {4, 2, 6}


def test_drafts_after_steps_without_are_those_of_an_engine_that_never_skipped(setup):
    deferred = setup.engine._deferred
    completions, skipping = setup.generate(alternating(5))
    assert deferred.num_tokens > 0 or any(skipping)
    proposer = setup.engine._proposer
    proposer.propose = deferred._propose  # vLLM's own, which runs the drafter in every step
    try:
        setup.engine.reset_prefix_cache()
        same, running = setup.generate(alternating(5))
    finally:
        proposer.propose = deferred.propose
    assert completions == same == setup.reference()
    assert skipping == running
    assert sum(map(len, skipping)) > 20


def test_without_catching_up_the_drafts_would_differ(setup, monkeypatch):
    # The test above can fail: keys and values that are never written change what is drafted.
    setup.engine.reset_prefix_cache()
    _, right = setup.generate(alternating(5))
    setup.engine.reset_prefix_cache()
    monkeypatch.setattr(setup.engine._deferred, "catch_up", setup.engine._deferred.discard)
    completions, wrong = setup.generate(alternating(5))
    assert wrong != right
    assert completions == setup.reference()


@pytest.mark.parametrize("seed", [1, 2])
def test_pushed_policy_is_the_one_that_samples(setup, seed):
    push_moved_policy(setup, seed)
    assert torch.equal(setup.engine.target_embedding()[:64], setup.policy.get_input_embeddings().weight)
    assert setup.engine.drafter_embedding().data_ptr() == setup.engine.target_embedding().data_ptr()
    assert setup.generate(lambda batch_size: 3)[0] == setup.reference()


def test_syncing_twice_changes_nothing(setup):
    push_moved_policy(setup, 3)
    once = setup.generate(lambda batch_size: 3)
    setup.engine.push_target(setup.policy.named_parameters())
    setup.engine.push_drafter(setup.drafter.vllm_weights())
    setup.engine.reset_prefix_cache()
    assert setup.generate(lambda batch_size: 3) == once


def test_stale_packed_head_is_caught(setup, monkeypatch):
    # vLLM's reload leaves the packed copy of a tied head as it was; see `RolloutEngine._repack_tied_head`.
    monkeypatch.setattr(RolloutEngine, "_repack_tied_head", staticmethod(lambda model: None))
    with pytest.raises(WeightMismatchError, match="lm_head"):
        push_moved_policy(setup, 4)
    monkeypatch.undo()
    push_moved_policy(setup, 4)
    assert setup.generate(lambda batch_size: 3)[0] == setup.reference()


def test_pushed_drafter_is_the_one_that_drafts(setup):
    push_moved_policy(setup, 5)
    _, before = setup.generate(lambda batch_size: 3)
    moved = Drafter.from_policy(setup.policy, torch.arange(1, 64, 2))
    setup.engine.push_drafter(moved.vllm_weights())
    setup.engine.reset_prefix_cache()
    completions, after = setup.generate(lambda batch_size: 3)
    assert completions == setup.reference()
    # The new one's vocabulary is the odd tokens, the old one's the even.
    assert {token % 2 for step in before for tokens in step for token in tokens} == {0}
    assert {token % 2 for step in after for tokens in step for token in tokens} == {1}
    setup.engine.push_drafter(setup.drafter.vllm_weights())


def test_drafter_with_an_embedding_is_refused(setup):
    with pytest.raises(ValueError, match="shares the policy's embedding"):
        setup.engine.push_drafter([("embed_tokens.weight", torch.zeros(64, 64))])


def test_another_drafter_in_the_engine_is_caught(setup, monkeypatch):
    weights = dict(setup.drafter.vllm_weights())
    monkeypatch.setattr(setup.engine, "_repack_tied_head", lambda model: None)
    load = setup.engine.drafter_module().load_weights
    zeros = {name: tensor.clone() for name, tensor in weights.items()}
    zeros["fc.weight"].zero_()
    monkeypatch.setattr(setup.engine.drafter_module(), "load_weights", lambda items: load(zeros.items()))
    with pytest.raises(WeightMismatchError, match="fc.weight"):
        setup.engine.push_drafter(weights.items())
    monkeypatch.undo()
    setup.engine.push_drafter(weights.items())


def test_steps_report_what_they_did(setup):
    setup.engine.schedule.choose = lambda batch_size: 2
    from vllm import SamplingParams

    setup.llm.enqueue(
        [{"prompt_token_ids": ids} for ids in PROMPTS], SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False
    )
    steps = []
    while setup.engine.has_unfinished_requests():
        _, step = setup.engine.step()
        steps.append(step)
    assert steps[0].has_prefill and steps[0].num_proposed == 2
    assert (
        not steps[1].has_prefill and steps[1].num_verified == steps[1].num_proposed == 2 and steps[1].batch_size == 3
    )
    assert steps[1].draft_tokens == 6 and steps[1].drafts == 3
    for step in steps:
        assert step.batch_size <= step.emitted_tokens <= step.batch_size + sum(step.accepted_by_position)
        assert step.seconds > 0
    assert steps[1].emitted_tokens == steps[1].batch_size + sum(steps[1].accepted_by_position)
    # Not what was accepted behind the ninth token.
    assert sum(step.emitted_tokens for step in steps) == 27


def looking_up(setup, phases):
    """A schedule of `(steps, draft tokens of the drafter, tokens to look up)`, round and round."""
    plan = [phase[1:] for phase in phases for _ in range(phase[0])]
    calls = iter(range(10**6))

    def choose(batch_size):
        num_draft_tokens, setup.engine.num_lookup_tokens = plan[next(calls) % len(plan)]
        return num_draft_tokens

    return choose


def remember_nearly_right_answers(setup, num_tokens=80):
    """Starts the lookup anew, with earlier answers in which every seventh token is another one."""
    setup.engine.ngram = NgramDrafter()
    for prompt, answer in zip(PROMPTS, setup.reference(max_tokens=num_tokens), strict=True):
        wrong = [(token + 1) % 64 if position % 7 == 6 else token for position, token in enumerate(answer)]
        setup.engine.ngram.remember(prompt, wrong)
    setup.engine.reset_prefix_cache()


@pytest.fixture()
def looked_up(setup):
    remember_nearly_right_answers(setup)
    yield setup
    setup.engine.num_lookup_tokens = 0


def test_greedy_text_with_looked_up_tokens_is_the_policys(looked_up):
    completions, verified = looked_up.generate(looking_up(looked_up, [(1, 0, 4)]))
    assert completions == looked_up.reference()
    assert len(verified) < 25  # 40 tokens without a draft accepted
    assert {len(tokens) for step in verified for tokens in step} >= {4}
    assert any(len(step) < 3 for step in verified[1:])  # requests without a match have no drafts


def test_lookup_and_drafter_take_turns(looked_up):
    phases = [(6, 0, 4), (5, 3, 0), (3, 0, 0)]
    completions, deferring = looked_up.generate(looking_up(looked_up, phases), max_tokens=80)

    # Without deferral vLLM runs the drafter in every step; the drafts must be the same, rejected tokens or not.
    remember_nearly_right_answers(looked_up)
    proposer, deferred = looked_up.engine._proposer, looked_up.engine._deferred
    proposer.propose = deferred._propose
    try:
        same, running = looked_up.generate(looking_up(looked_up, phases), max_tokens=80)
    finally:
        proposer.propose = deferred.propose
    assert completions == same == looked_up.reference(max_tokens=80)
    assert deferring == running


@pytest.mark.parametrize(("num_draft_tokens", "num_lookup_tokens"), [(0, 0), (5, 0), (0, 5)])
def test_rollout_that_runs_into_the_context_limit(looked_up, num_draft_tokens, num_lookup_tokens):
    completions, _ = looked_up.generate(
        looking_up(looked_up, [(1, num_draft_tokens, num_lookup_tokens)]), max_tokens=500
    )
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
    assert looked_up.engine.ngram._running == {}
    # Each prompt once, and each answer behind the last four tokens of its prompt.
    tails = sum(2 * min(len(prompt), 4) for prompt in PROMPTS)
    expected = sum(map(len, PROMPTS)) + tails + sum(map(len, completions))
    assert looked_up.engine.ngram.num_tokens == expected


def test_a_push_brings_its_own_mapping_of_draft_tokens(setup):
    other = Drafter.from_policy(setup.policy, torch.arange(1, 64, 2))

    def parities():
        _, verified = setup.generate(lambda batch_size: 3)
        return {token % 2 for step in verified for tokens in step for token in tokens}

    assert parities() == {0}
    try:
        setup.engine.push_drafter(other.vllm_weights())
        assert parities() == {1}
        with pytest.raises(WeightMismatchError, match="d2t"):
            setup.engine._check_mapping(setup.engine.drafter_module(), dict(setup.drafter.vllm_weights()))
    finally:
        setup.engine.push_drafter(setup.drafter.vllm_weights())
    assert parities() == {0}
