"""
Kind of fault: the environment is taken at its word. Clusters set a launcher's variables for every process of a pod.
"""

import json
import os
import subprocess
import sys

import pytest
from tests.conftest import environment_of_its_own

from tlt_trl.generation.standalone import LAUNCHER_VARIABLES, environment_of_one_process


POD = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "pod-0.invalid", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
DATA_PARALLEL = {"VLLM_DP_SIZE": "2", "VLLM_DP_RANK": "1", "MASTER_PORT": "tcp://10.0.0.1:29500", "WORLD_SIZE": "two"}


def run(environment, *arguments):
    """A tool that waits for other processes does so for ever."""
    command = [sys.executable, "-m", "tlt_trl.tools.cli", *arguments]
    environment = environment_of_its_own() | environment
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=150)


class TestToolsAreOneProcess:
    @pytest.mark.engine
    def test_doctor_in_a_pod(self, tiny_policy_dir):
        done = run(POD, "doctor", "--model", tiny_policy_dir, "--dtype", "float32", "--json")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert json.loads(done.stdout)["ok"]

    @pytest.mark.engine
    @pytest.mark.slow
    def test_warmup_of_a_launcher(self, tiny_policy_dir, tmp_path):
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "w5 w6"}\n')
        options = {"model": tiny_policy_dir, "prompts": tmp_path / "prompts.jsonl", "output": tmp_path / "drafter"}
        options |= {"tokens": 60, "epochs": 1, "max_completion_length": 16, "max_num_seqs": 4}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        done = run(TORCHRUN | DATA_PARALLEL, "warmup", *words)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert (tmp_path / "drafter" / "model.safetensors").exists()

    @pytest.mark.parametrize("environment", [POD, TORCHRUN, DATA_PARALLEL, {}])
    def test_what_an_engine_reads(self, environment, monkeypatch):
        for name in LAUNCHER_VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with environment_of_one_process():
            inside = {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ}
            assert int(inside.pop("MASTER_PORT")) > 1023
            assert inside == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        # A tool called from a script leaves its environment as it was.
        assert {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ} == environment
