"""Selectors on a real engine: what they choose in the middle of a rollout does not show in the text."""

import pytest
import torch
from tests.lossless.lossless_tools import SIGNIFICANCE, VOCAB_SIZE, rollout_p_value

from tlt_trl.generation.rollout_loop import RolloutLoop
from tlt_trl.strategy import Strategy, make_selector


pytest.importorskip("vllm")
pytestmark = pytest.mark.engine
STRATEGIES = [Strategy("eagle3", 1), Strategy("eagle3", 3), Strategy("ngram", 4)]


@pytest.fixture
def rollout(under_test, monkeypatch):
    """Samples by way of a rollout loop with that selector; returns the token ids and the steps."""

    def rollout(selector, prompts, max_tokens):
        from vllm import SamplingParams

        steps, step = [], under_test.engine.step

        def recorded():
            outputs, done = step()
            steps.append(done)
            return outputs, done

        monkeypatch.setattr(under_test.engine, "step", recorded)
        torch.manual_seed(0)
        params = [
            SamplingParams(max_tokens=length, temperature=1.0, ignore_eos=True, detokenize=False)
            for length in max_tokens
        ]
        loop = under_test.llm.rollout_loop = RolloutLoop(under_test.engine, selector)
        try:
            outputs = under_test.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        finally:
            under_test.llm.rollout_loop = None
        assert loop.pop_stats().steps == len(steps)
        return [list(output.outputs[0].token_ids) for output in outputs], steps

    return rollout


def prompts_of(number):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(4, VOCAB_SIZE, (number, 4), generator=generator).tolist()


@pytest.mark.parametrize("name", ["beg_mab", "cost_model"])
def test_adaptive_selectors(under_test, rollout, name):
    prompts = prompts_of(320)
    selector = make_selector(name, STRATEGIES, under_test.engine.max_num_seqs, seed=0)
    # Lengths that differ, so that the batch shrinks through the buckets.
    lengths = [16 if i % 4 else 64 for i in range(len(prompts))]
    token_ids, steps = rollout(selector, prompts, lengths)
    assert len({str(step.proposed) for step in steps}) > 1
    for first, every in ((0, 4), (1, 4), (2, 4), (3, 4)):
        chosen = slice(first, None, every)
        assert rollout_p_value(under_test.policy, prompts[chosen], token_ids[chosen], temperature=1.0) > SIGNIFICANCE


def test_a_threshold_that_is_crossed_in_the_middle(under_test, rollout):
    prompts, threshold = prompts_of(320), 64
    selector = make_selector(
        "fixed", [Strategy("eagle3", 3)], under_test.engine.max_num_seqs, activation_threshold=threshold
    )
    long = [i % 5 == 0 for i in range(len(prompts))]  # 64 of them
    token_ids, steps = rollout(selector, prompts, [64 if is_long else 10 for is_long in long])
    proposed = {step.batch_size <= threshold: str(step.proposed) for step in steps}
    assert proposed == {False: "off", True: "eagle3 x3"}
    assert all(step.draft_tokens == 0 for step in steps if step.batch_size > threshold)
    assert sum(step.draft_tokens for step in steps) > 0
    for group in (True, False):
        mine = [i for i, is_long in enumerate(long) if is_long == group]
        p_value = rollout_p_value(
            under_test.policy, [prompts[i] for i in mine], [token_ids[i] for i in mine], temperature=1.0
        )
        assert p_value > SIGNIFICANCE
