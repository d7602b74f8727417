"""The shortest script that a user would write trains, with nothing but what it says."""

import ast
import json
import subprocess
import sys

import pytest
from tests.conftest import ROOT, environment_of_its_own


SCRIPT = ROOT / "examples" / "minimal.py"


@pytest.mark.engine
def test_trains_and_leaves_a_drafter(tiny_policy_dir, tmp_path):
    # The engine's compiler takes a minute, and its cache of keys and values half of the memory, for any policy.
    environment = environment_of_its_own() | {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, str(SCRIPT), tiny_policy_dir, "2"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    drafter = tmp_path / "runs" / "minimal" / "drafter"
    assert json.loads((drafter / "provenance.json").read_text())["policy_steps"] == 2
    assert (drafter / "model.safetensors").is_file()


def test_is_short_and_needs_no_private_helper():
    text = SCRIPT.read_text()
    imported = {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert len(text.splitlines()) <= 20 and imported == {"datasets", "tlt_trl"}
