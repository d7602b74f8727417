"""`tlt-trl warmup` from a data set to a drafter, with the real engine in a process of its own."""

import json
import subprocess
import sys

import pytest
from datasets import Dataset
from tests.conftest import environment_of_its_own
from transformers import AutoConfig

from tlt_trl import Drafter
from tlt_trl.drafter import DrafterTrainingArguments
from tlt_trl.tools.warmup import warm_up
from tlt_trl.vllm_internals.contract import UnsupportedEngineError


pytest.importorskip("vllm")
pytestmark = pytest.mark.engine


def run(policy: str, tmp_path, **changes) -> dict:
    options = {
        "dataset": tmp_path / "rows.parquet", "prompt_column": "question", "output": tmp_path / "drafter",
        "tokens": 1200, "epochs": 2, "max_completion_length": 32, "max_num_seqs": 4, "unroll_steps": 3,
        "temperature": 0.5,
    } | changes  # fmt: skip
    rows = [{"question": f"w{5 + i} w{6 + i} w{7 + i}"} for i in range(6)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    command = [sys.executable, "-m", "tlt_trl.tools.cli", "warmup", "--model", policy]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    done = subprocess.run(command, env=environment_of_its_own(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_dataset_becomes_a_drafter_that_drafts_meanwhile(tiny_policy_dir, tmp_path):
    result = run(tiny_policy_dir, tmp_path, draft_vocab_size=32)
    config = AutoConfig.from_pretrained(tiny_policy_dir)
    drafter = Drafter.from_pretrained(result["output"], config)
    assert drafter.config.draft_vocab_size == 32 and drafter.t2d[config.eos_token_id]
    provenance = json.loads((tmp_path / "drafter" / "provenance.json").read_text())
    # Answers and their prompts of three tokens, less a twentieth.
    assert provenance["tokens_trained"] == result["tokens_trained"] >= 2 * 0.9 * 1200
    assert provenance["held_out"]["acceptance_length"] == pytest.approx(result["acceptance_length"], abs=1e-3)
    assert 0 < result["sampling_drafter_share"] < 1 and result["sampled_tokens_per_s"] > 0


@pytest.mark.slow
def test_one_round_is_enough_and_has_no_drafter(tiny_policy_dir, tmp_path):
    result = run(tiny_policy_dir, tmp_path, tokens=60)
    assert result["sampling_drafter_share"] == 0 and result["tokens_trained"] > 0
    drafter = Drafter.from_pretrained(result["output"], AutoConfig.from_pretrained(tiny_policy_dir))
    assert drafter.has_full_vocabulary


def test_what_cannot_work_is_refused_before_anything_is_loaded(tiny_policy_dir, tmp_path):
    for option, message in (({"temperature": 0.0}, "temperature=0.0"), ({"unroll_steps": 0}, "unroll_steps=0")):
        with pytest.raises(ValueError, match=message):
            DrafterTrainingArguments(**option)
    with pytest.raises(ValueError, match="No prompt fits: at most 12 tokens"):
        warm_up(tiny_policy_dir, [[5] * 13], tmp_path, max_completion_length=500)
    AutoConfig.for_model("gpt_neo", architectures=["GPTNeoForCausalLM"]).save_pretrained(tmp_path / "policy")
    with pytest.raises(UnsupportedEngineError, match="GPTNeoForCausalLM cannot be drafted for"):
        warm_up(str(tmp_path / "policy"), [[5, 6]], tmp_path)
