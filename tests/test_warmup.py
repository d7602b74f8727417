"""`tlt-trl warmup` from a data set to a drafter, with the real engine in a process of its own."""

import json
import subprocess
import sys

import pytest
from datasets import Dataset
from transformers import AutoConfig

from tests.conftest import environment_of_its_own
from tlt_trl import Drafter


@pytest.mark.parametrize("draft_vocab_size", [None, 32])
def test_dataset_becomes_a_drafter_that_drafted_meanwhile(tiny_policy_dir, tmp_path, draft_vocab_size):
    rows = [{"question": f"w{5 + i} w{6 + i} w{7 + i}"} for i in range(6)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    options = {
        "--model": tiny_policy_dir, "--dataset": tmp_path / "rows.parquet", "--prompt_column": "question",
        "--output": tmp_path / "drafter", "--tokens": 1200, "--epochs": 2, "--max_completion_length": 32,
        "--max_num_seqs": 4, "--unroll_steps": 3, "--temperature": 0.5,
    }  # fmt: skip
    if draft_vocab_size is not None:
        options["--draft_vocab_size"] = draft_vocab_size
    command = [
        sys.executable,
        "-m",
        "tlt_trl.cli",
        "warmup",
        *(str(part) for pair in options.items() for part in pair),
    ]
    done = subprocess.run(command, env=environment_of_its_own(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])

    config = AutoConfig.from_pretrained(tiny_policy_dir)
    drafter = Drafter.from_pretrained(result["output"], config)
    assert drafter.config.draft_vocab_size == (draft_vocab_size or config.vocab_size)
    assert drafter.t2d[config.eos_token_id]
    provenance = json.loads((tmp_path / "drafter" / "provenance.json").read_text())
    assert provenance["tokens_trained"] == result["tokens_trained"] >= 2 * 1000
    assert provenance["held_out"]["acceptance_length"] == pytest.approx(result["acceptance_length"], abs=1e-3)
    # One pass over the first round is enough for some drafts to be right.
    assert result["sampling_acceptance_length"] > 1.0
    assert result["sampled_tokens_per_s"] > 0
