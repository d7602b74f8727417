"""
Kind of fault: checks that sit in the config and not at the engine, so that whoever calls the engine goes round them.
"""

import logging

import pytest
from tests.lossless.lossless_tools import EngineUnderTest, save_predictable_policy, trained_drafter
from tests.lossless.test_holes import MAX_DEVIATION, ends_at_the_first_chance
from vllm import SamplingParams

from tlt_trl.generation.rollout_loop import RolloutLoop
from tlt_trl.strategy import Strategy, make_selector


pytestmark = pytest.mark.engine
PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}


@pytest.fixture(scope="module")
def under_test(make_tiny_policy, tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("policy"))
    policy = save_predictable_policy(make_tiny_policy, directory)
    return EngineUnderTest(policy, directory, trained_drafter(policy), str(tmp_path_factory.mktemp("drafter")))


@pytest.fixture
def loop(under_test):
    """The engine as the trainer has it: stepped by a rollout loop."""
    loop = under_test.llm.rollout_loop = RolloutLoop(
        under_test.engine, make_selector("fixed", [Strategy("eagle3", 3)], 512)
    )
    yield loop
    under_test.llm.rollout_loop = None


class TestChecksAtTheEngine:
    def test_chat_runs_through_the_loop(self, under_test, loop):
        messages = [[{"role": "user", "content": "w5 w6 w7"}]] * 3
        outputs = under_test.llm.chat(
            messages,
            SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True),
            chat_template="{{ messages[0].content }}",
            use_tqdm=False,
        )
        assert [len(output.outputs[0].token_ids) for output in outputs] == [12] * 3
        stats = loop.pop_stats()
        assert stats.emitted_tokens == 36 and stats.draft_tokens > 0

    def test_requests_that_were_queued_run_through_the_loop(self, under_test, loop):
        under_test.llm.enqueue([PROMPT] * 2, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert len(under_test.llm.wait_for_completion(use_tqdm=False)) == 2
        assert loop.pop_stats().emitted_tokens == 16

    def test_beam_search_runs_plainly(self, under_test, loop):
        from vllm.sampling_params import BeamSearchParams

        def best():
            (output,) = under_test.llm.beam_search([PROMPT], BeamSearchParams(beam_width=4, max_tokens=12))
            return [sequence.tokens for sequence in output.sequences]

        under_test.llm.rollout_loop = None
        under_test.engine.choose = lambda batch_size: Strategy.off()
        expected = best()
        under_test.llm.rollout_loop = loop
        under_test.llm.generate([PROMPT], SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
        loop.pop_stats()
        assert best() == expected and loop.pop_stats().steps == 0
        under_test.llm.generate([PROMPT], SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
        stats = loop.pop_stats()
        assert stats.emitted_tokens == 12 and stats.draft_tokens > 0

    def test_min_tokens_made_in_user_code_are_exact(self, under_test, loop, caplog):
        with caplog.at_level(logging.WARNING):
            assert ends_at_the_first_chance(under_test, seed=11) < MAX_DEVIATION
        assert [record.getMessage() for record in caplog.records if "`min_tokens`" in record.getMessage()] != []
        caplog.clear()
        under_test.llm.generate([PROMPT], SamplingParams(max_tokens=4, min_tokens=2), use_tqdm=False)
        assert "min_tokens" not in caplog.text  # one warning is enough

    def test_only_steps_with_such_a_request_are_plain(self, under_test, loop):
        plain = SamplingParams(max_tokens=6, min_tokens=2, temperature=1.0, ignore_eos=True)
        exact = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
        under_test.llm.generate([PROMPT], plain, use_tqdm=False)
        assert loop.pop_stats().draft_tokens == 0
        under_test.llm.generate([PROMPT] * 2, [plain, exact], use_tqdm=False)
        stats = loop.pop_stats()
        assert stats.draft_tokens > 0 and stats.emitted_tokens == 46
        under_test.llm.generate([PROMPT], exact, use_tqdm=False)
        assert loop.pop_stats().speculative_steps > 0

    def test_a_seed_made_in_user_code_gives_the_same_text_again(self, under_test, loop, monkeypatch):
        def texts():
            for number in (1, 3):  # measured times may choose either
                selector = make_selector("fixed", [Strategy("eagle3", number)], 512)
                under_test.llm.rollout_loop = RolloutLoop(under_test.engine, selector)
                seeded = [SamplingParams(max_tokens=24, temperature=1.0, seed=i, ignore_eos=True) for i in range(8)]
                outputs = under_test.llm.generate([PROMPT] * 8, seeded, use_tqdm=False)
                yield [output.outputs[0].token_ids for output in outputs]

        monkeypatch.setattr(under_test.engine, "repeats_seeds", False)
        first, second = texts()
        assert first == second
        monkeypatch.setattr(under_test.engine, "repeats_seeds", True)  # not checked: the fault
        first, second = texts()
        assert first != second
