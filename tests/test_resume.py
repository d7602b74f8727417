"""An interrupted run that goes on from a checkpoint does what the unbroken one did."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, environment_of_its_own, save_tiny_policy


pytestmark = pytest.mark.engine

# Wall-clock that no clock was injected into, and that no two runs have in common.
TIMES = re.compile("step_time|idle|latency|capture")


def run(
    launcher: list[str], policy: str, output_dir: Path, result: Path, environment: dict[str, str], **kwargs
) -> str:
    environment = environment_of_its_own() | environment
    script = [str(ROOT / "tests" / "resume_run.py"), policy, str(output_dir), str(result), json.dumps(kwargs)]
    done = subprocess.run([*launcher, *script], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stderr


def steps_after_the_resume(result: dict) -> list[dict]:
    logs = [{name: value for name, value in log.items() if not TIMES.search(name)} for log in result["logs"]]
    return [log for log in logs if log["step"] > 3]


def assert_equal_runs(unbroken: dict, resumed: dict) -> None:
    logs, logs_again = steps_after_the_resume(unbroken), steps_after_the_resume(resumed)
    assert [log["step"] for log in logs] == [4, 5, 6]
    assert all(log["tlt/draft_tokens/proposed"] > 0 for log in logs)
    for log, again in zip(logs, logs_again, strict=True):
        different = {name: (log[name], again.get(name)) for name in log if log[name] != again.get(name)}
        assert not different, different
    for name in unbroken.keys() - {"logs"}:
        assert resumed[name] == unbroken[name], name
    assert unbroken["drafter_steps"] > 0


def test_resume_on_one_process(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy", vocab_size=64, num_layers=2)
    launcher = [sys.executable]
    # Offline, every push fails, which must stop nothing and be reported.
    log = run(launcher, policy, tmp_path / "run", tmp_path / "unbroken.json", {}, drafter_push_to_hub=True)
    assert "The drafter was not pushed to run-drafter" in log and "hf upload run-drafter" in log
    # As if the run had been killed while it saved the policy of step 6: the newest whole checkpoint is that of step 3.
    (tmp_path / "run" / "checkpoint-6" / "trainer_state.json").unlink()
    run(launcher, policy, tmp_path / "run", tmp_path / "resumed.json", {}, resume=True, save_total_limit=1)
    unbroken, resumed = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("unbroken", "resumed"))
    assert_equal_runs(unbroken, resumed)
    assert [folder.name for folder in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-6"]
    card = (tmp_path / "run" / "drafter" / "README.md").read_text()
    assert f"| 6 | {resumed['logs'][-1]['tlt/acceptance_length']:.3f} |" in card
    provenance = json.loads((tmp_path / "run" / "drafter" / "provenance.json").read_text())
    assert provenance["policy_steps"] == 6 and provenance["tokens_trained"] == resumed["drafter_tokens"] > 0


@pytest.mark.processes
@pytest.mark.slow
def test_resume_on_two_processes(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy", vocab_size=64, num_layers=2)
    config = ROOT / "accelerate_configs" / "cpu_2_processes.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    launcher += ["--main_process_port", "0"]
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "OMP_NUM_THREADS": "1",
    }
    kwargs = {"per_device_train_batch_size": 2}
    run(launcher, policy, tmp_path / "run", tmp_path / "unbroken.json", environment, **kwargs)
    checkpoint = str(tmp_path / "run" / "checkpoint-3")
    run(launcher, policy, tmp_path / "run", tmp_path / "resumed.json", environment, resume=checkpoint, **kwargs)
    results = [json.loads((tmp_path / f"{n}.json.{r}").read_text()) for n in ("unbroken", "resumed") for r in (0, 1)]
    assert_equal_runs(results[0], results[2])
    # The other rank has a selector, a buffer and a random state of its own.
    for name in results[1].keys() - {"logs"}:
        assert results[3][name] == results[1][name], name
    assert results[1]["drafter"] == results[0]["drafter"] and results[1]["buffer"] != results[0]["buffer"]
