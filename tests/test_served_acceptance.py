"""The drafter that a run leaves behind is worth as much in plain vLLM as it was in the trainer."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from tlt_trl.generation.standalone import free_port

from .conftest import ROOT, environment_of_its_own, save_tiny_policy
from .served_run import MAX_COMPLETION_LENGTH, NUM_DRAFT_TOKENS, TEMPERATURE


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    policy = save_tiny_policy(folder / "policy", vocab_size=64, num_layers=2, spread=0.5)
    run("train", policy, str(folder / "run"), str(folder / "result.json"))
    result = json.loads((folder / "result.json").read_text())
    assert result["every_tensor_equal"] and result["drafter_steps"] > 0
    # Enough acceptance that a drafter gone wrong would show.
    assert result["acceptance_length"] > 1.3
    return result | {"folder": folder}


def test_acceptance_in_a_plain_engine(trained):
    result = trained["folder"] / "result.json"
    run("serve", str(trained["folder"] / "run"), str(result))
    served = json.loads(result.read_text())
    assert not [name for name in served["modules"] if "engine" in name or "trainer" in name]
    # Enough drafts that chance is far below the 5 %.
    assert served["drafts"] > 5000
    assert served["acceptance_length"] == pytest.approx(trained["acceptance_length"], rel=0.05)


def answer(url: str, body: dict | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return response.read().decode()


def wait_until_healthy(url: str, server: subprocess.Popen) -> None:
    deadline_s = time.monotonic() + 300
    while server.poll() is None and time.monotonic() < deadline_s:
        try:
            answer(f"{url}/health")
            return
        except urllib.error.URLError:
            time.sleep(0.5)
    raise RuntimeError("The server did not come up.")


@pytest.mark.slow
def test_acceptance_over_http(trained, tmp_path):
    """What `vllm serve` runs; the command itself asks for a distribution named vllm, which a CPU build is not."""
    run_folder, port = trained["folder"] / "run", free_port()
    config = {"method": "eagle3", "model": f"{run_folder}/drafter", "num_speculative_tokens": NUM_DRAFT_TOKENS}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(run_folder), "--port", str(port),
        "--speculative-config", json.dumps(config), "--enforce-eager", "--dtype", "float32", "--max-model-len", "64",
        "--kv-cache-memory-bytes", str(2**28),
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "server.log"
    with log.open("w") as stream:
        server = subprocess.Popen(command, env=environment_of_its_own(), stdout=stream, stderr=stream)
    try:
        wait_until_healthy(url, server)
        body = {"model": str(run_folder), "temperature": TEMPERATURE, "max_tokens": MAX_COMPLETION_LENGTH}
        answers = json.loads(answer(f"{url}/v1/completions", body | {"prompt": trained["prompts"]}))
        metrics = answer(f"{url}/metrics")
    except (RuntimeError, urllib.error.URLError) as error:
        raise AssertionError(log.read_text()[-6000:]) from error
    finally:
        server.terminate()
        server.wait(timeout=60)
    assert len(answers["choices"]) == len(trained["prompts"])
    counters = {line.split("{")[0]: float(line.split()[-1]) for line in metrics.splitlines() if "_total{" in line}
    drafts = counters["vllm:spec_decode_num_drafts_total"]
    assert drafts > 5000
    acceptance_length = 1.0 + counters["vllm:spec_decode_num_accepted_tokens_total"] / drafts
    assert acceptance_length == pytest.approx(trained["acceptance_length"], rel=0.05)
