"""A drafter that knows fewer positions than the policy."""

import pytest
import torch
from tests.conftest import save_tiny_policy
from transformers import AutoModelForCausalLM

from tlt_trl.drafter.modeling_drafter import Drafter
from tlt_trl.generation.engine import RolloutEngine
from tlt_trl.generation.rollout_loop import RolloutLoop
from tlt_trl.generation.standalone import build_llm, completion_ids
from tlt_trl.strategy import Strategy, make_selector


@pytest.mark.engine
def test_rollout_past_the_drafters_positions_is_the_policys(tmp_path):
    directory = save_tiny_policy(tmp_path / "policy")
    policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    drafter = Drafter.from_policy(policy)
    drafter.config.max_position_embeddings = 32
    drafter.save_pretrained(tmp_path / "drafter")
    llm = build_llm(
        directory,
        drafter=str(tmp_path / "drafter"),
        max_num_seqs=2,
        max_model_len=128,
        enforce_eager=True,
        kv_cache_memory_bytes=2**26,
        dtype="float32",
    )
    strategies = [Strategy("eagle3", 2), Strategy("eagle3", 5), Strategy("ngram", 4)]
    loop = llm.rollout_loop = RolloutLoop(RolloutEngine(llm), make_selector("beg_mab", strategies, 2))
    prompts = [[1, 5, 6, 7], [1, 9, 10]]
    for _ in range(3):
        completions = completion_ids(llm, prompts, temperature=0.0, max_tokens=80, ignore_eos=True)
        for prompt, completion in zip(prompts, completions, strict=True):
            expected = policy.generate(
                torch.tensor([prompt]), max_new_tokens=80, do_sample=False, eos_token_id=None, pad_token_id=3
            )
            assert completion == expected[0, len(prompt) :].tolist()
    assert len(loop.ledger.steps_by_strategy()) == 4
