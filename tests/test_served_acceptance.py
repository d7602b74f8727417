"""The drafter that a run leaves behind is worth as much in a plain `vllm.LLM` as it was in the trainer."""

import json
import subprocess
import sys

import pytest

from .conftest import ROOT, environment_of_its_own, save_tiny_policy


pytestmark = pytest.mark.engine


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "served_run.py"), *arguments],
        env=environment_of_its_own(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_acceptance_in_a_plain_engine(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy", vocab_size=64, num_layers=2, spread=0.5)
    result = tmp_path / "result.json"
    run("train", policy, str(tmp_path / "run"), str(result))
    trained = json.loads(result.read_text())
    run("serve", str(tmp_path / "run"), str(result))
    served = json.loads(result.read_text())
    assert trained["every_tensor_equal"] and trained["drafter_steps"] > 0
    assert not [name for name in served["modules"] if "engine" in name or "trainer" in name]
    # Enough drafts that chance is far below the 5 %, and enough acceptance that a drafter gone wrong would show.
    assert served["drafts"] > 5000 and trained["acceptance_length"] > 1.3
    assert served["acceptance_length"] == pytest.approx(trained["acceptance_length"], rel=0.05)
