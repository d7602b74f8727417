"""A script that TRL runs is not stopped where it cannot speculate: it goes on as plain TRL does, and says why."""

import json
import os
import subprocess
import sys

import pytest
from tests.conftest import ROOT, environment_of_its_own
from tests.tolerance import logprob_tolerance


pytest.importorskip("vllm")
pytestmark = pytest.mark.engine


def run(folder, **kwargs):
    done = subprocess.run(
        [sys.executable, "-m", "tests.dropin.fallback_script", str(folder), json.dumps(kwargs)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment_of_its_own(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[len("RESULT") :])


def assert_trained_as_plain_trl(result, folder, *words):
    assert result["moved"] and result["logp_difference"] < logprob_tolerance()
    assert not result["speculative"] and not result["has_drafter"] and result["hooks"] == 0
    assert not [name for name in result["names"] if name.startswith("tlt/")]
    assert not os.path.exists(folder / "run" / "drafter")
    assert not os.path.exists(folder / "run" / "checkpoint-3" / "drafter")
    (warning,) = result["warnings"]
    assert all(word in warning for word in ("goes on without speculation", *words)), warning


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        # Other reasons: tests/generation/test_policy_checks.py. A filter that vLLM cannot apply to drafts (so
        # weak that log-probs stay what they are), and a class that gives away no hidden states.
        ({"min_p": 2e-5}, ["min_p=2e-05", "`top_p`"]),
        ({"model_type": "gemma"}, ["GemmaForCausalLM", "auxiliary hidden states"]),
    ],
)
def test_goes_on_with_a_plain_engine(tmp_path, kwargs, words):
    result = run(tmp_path, **kwargs)
    assert_trained_as_plain_trl(result, tmp_path, *words)
    assert result["generation"] == "PlainVLLMGeneration" and not result["speculates"]


def test_goes_on_when_the_check_at_start_up_fails(tmp_path):
    result = run(tmp_path, canary_fails=True)
    assert_trained_as_plain_trl(result, tmp_path, "temperature is wrong", "tlt-trl doctor")
    assert result["generation"] == "SpeculativeVLLMGeneration"
