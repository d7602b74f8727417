"""An engine that is shut down gives its memory back, in a process of its own: it takes the process groups with it."""

import subprocess
import sys

import pytest
from tests.conftest import environment_of_its_own
from transformers import AutoModelForCausalLM

from tlt_trl.drafter.modeling_drafter import Drafter


pytestmark = pytest.mark.engine

SCRIPT = """
import gc, sys, weakref
from tlt_trl.generation.engine import RolloutEngine
from tlt_trl.generation.rollout_loop import RolloutLoop
from tlt_trl.generation.standalone import build_llm, completion_ids
from tlt_trl.strategy import Strategy, make_selector

if __name__ == "__main__":
    llm = build_llm(
        sys.argv[1], drafter=sys.argv[2], max_num_seqs=2, max_model_len=64, enforce_eager=True,
        kv_cache_memory_bytes=2**26, dtype="float32",
    )
    engine = RolloutEngine(llm)
    llm.rollout_loop = RolloutLoop(engine, make_selector("fixed", [Strategy("eagle3", 2)], 2))
    completion_ids(llm, [[1, 5, 6]], temperature=0.0, max_tokens=8)
    alive = [weakref.ref(engine.weights.policy), weakref.ref(engine.weights.drafter)]
    engine.shutdown()
    del engine, llm
    gc.collect()
    print("ALIVE", sum(module() is not None for module in alive))
"""


def test_policy_and_drafter_are_gone(tiny_policy_dir, tmp_path):
    policy = AutoModelForCausalLM.from_pretrained(tiny_policy_dir)
    Drafter.from_policy(policy).save_pretrained(tmp_path / "drafter")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tiny_policy_dir, str(tmp_path / "drafter")],
        env=environment_of_its_own(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "ALIVE 0" in done.stdout
