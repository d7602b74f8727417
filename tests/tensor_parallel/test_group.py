"""One engine over two processes: same drafter, same choices, slices of every rank compared, one failure ends both."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.conftest import ROOT, environment_of_its_own, save_tiny_policy


pytestmark = [pytest.mark.engine, pytest.mark.processes]

LEARNING = {"speculation_selector": "auto", "drafter_time_budget": 0.5}
SCRIPT = Path(__file__).with_name("group_script.py")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"), vocab_size=128, num_layers=2, tied=False)


def train(policy, output_dir, **options):
    """Results of both ranks."""
    output_dir.mkdir()
    config = ROOT / "accelerate_configs" / "cpu_2_processes.yaml"
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--main_process_port", "0"]
    process = subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), policy, str(output_dir), json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment_of_its_own() | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=250)
    finally:
        # Ranks that wait for each other outlive their launcher.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-4000:]
    return [json.loads((output_dir / f"result_{rank}.json").read_text()) for rank in range(2)]


def test_ranks_of_an_engine_train_and_choose_alike(policy, tmp_path):
    first, second = train(policy, tmp_path / "run", max_completion_length=24, **LEARNING)
    assert "error" not in first and "error" not in second
    assert first["disabled"] == second["disabled"] == []
    # The second rank's own policy was all zeros.
    assert first["drafter_at_start"] == second["drafter_at_start"] > 0
    assert first["drafter"] == second["drafter"] != first["drafter_at_start"]
    assert first["policy"] == second["policy"]
    # Their selectors have heard of different times, and still both have run the same strategies.
    assert first["choices"] == second["choices"]
    assert len(set(first["choices"])) > 1
    assert first["asked"] == second["asked"] < len(first["choices"]) / 2
    assert len(first["logs"]) == 3
    assert first["logs"][-1]["tlt/drafter_tokens"] > 0
    assert all(log["tlt/alarm/drafter_mismatch"] == 0.0 for log in first["logs"])


def test_a_wrong_slice_of_the_policy_ends_both_ranks(policy, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    first, second = train(policy, tmp_path / "run", wrong_policy=name)
    assert second["error"].startswith("WeightMismatchError") and name in second["error"]
    assert first["error"].startswith("OtherRankFailedError")
    assert "Rank 1: WeightMismatchError" in first["error"] and name in first["error"]


@pytest.mark.slow
def test_a_wrong_slice_of_the_drafter_stops_its_use_on_both_ranks(policy, tmp_path):
    first, second = train(policy, tmp_path / "run", wrong_drafter="midlayer.mlp.down_proj.weight")
    assert "error" not in first and "error" not in second
    assert first["disabled"] == second["disabled"] == ["drafter_mismatch"]
    assert set(first["choices"]) == {"off"}
    assert all(log["tlt/alarm/drafter_mismatch"] == 1.0 for log in first["logs"])
