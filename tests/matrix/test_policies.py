"""
Kinds of policies through the real trainer and engine: three steps, then the engine's distributions under speculation
against the policy's own. Biases and norms are not at their initial values, and the steps move every weight.
"""

import json
import math
import subprocess
import sys

import pytest
import torch
from tests.conftest import ROOT, environment_of_its_own
from tests.tolerance import forward_operations, forward_roundings, typical_difference
from transformers import AutoConfig


pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

# Every pair of type, dtype, tied or not, and compiled or not.
CASES = [
    ("llama", "bfloat16", "tied", "compiled", {"speculation_selector": "cost_model"}),
    ("qwen2", "bfloat16", "tied", "eager", {"speculation_selector": "beg_mab"}),
    ("qwen3", "bfloat16", "untied", "eager", {}),
    ("mistral", "float32", "tied", "eager", {}),
    ("llama", "float32", "untied", "eager", {"speculation_selector": "beg_mab"}),
    ("mistral", "bfloat16", "untied", "compiled", {"speculation_selector": "cost_model"}),
    ("qwen2", "float32", "untied", "compiled", {}),
    ("qwen3", "float32", "tied", "compiled", {}),
]
FAST = 4


@pytest.mark.parametrize(
    ("model_type", "dtype", "head", "engine", "kwargs"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (i >= FAST)) for i, case in enumerate(CASES)],
)
def test_the_engine_samples_from_the_policy(tmp_path, model_type, dtype, head, engine, kwargs):
    case = {"model_type": model_type, "dtype": dtype, "tied": head == "tied", "compiled": engine == "compiled"}
    result = run(tmp_path, **case, **kwargs)
    assert result["speculative"] and len(result["losses"]) == 3 and all(map(math.isfinite, result["losses"]))
    assert result["draft_tokens"] > 0
    if "speculation_selector" not in kwargs:  # else training has to pay for itself, and here it cannot
        assert result["drafter_steps"] > 0
    # Log-probs are differences of logits, which are what is rounded.
    scale = result["spread"]
    config = AutoConfig.from_pretrained(tmp_path / "policy")
    count = forward_operations(config, num_tokens=30) if dtype == "float32" else forward_roundings(config)
    limit = typical_difference(getattr(torch, dtype), count, scale)
    assert result["difference"] < limit < 0.25 * result["stale_difference"]


def run(folder, **case):
    done = subprocess.run(
        [sys.executable, "-m", "tests.matrix.matrix_script", str(folder), json.dumps(case)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment_of_its_own(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[len("RESULT") :])
