"""`tlt-trl doctor` on a tiny policy: what it prints and returns, and that it catches the fault of the CPU backend."""

import json
import subprocess
import sys

import pytest
from tests.conftest import environment_of_its_own

from tlt_trl.tools import doctor
from tlt_trl.tools.doctor import check_versions
from tlt_trl.tools.doctor_checks import check_drafter, check_model
from tlt_trl.tools.findings import Finding, as_table, collect
from tlt_trl.vllm_internals.cpu import SKIP_VARIABLE


pytest.importorskip("vllm")


def run(*args, **env):
    command = [sys.executable, "-m", "tlt_trl.tools.cli", "doctor", *args]
    environment = environment_of_its_own() | env
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)


@pytest.mark.engine
def test_report_of_a_healthy_machine(tiny_policy_dir):
    done = run("--model", tiny_policy_dir, "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"]
    sections = [finding["section"] for finding in report["findings"]]
    assert list(dict.fromkeys(sections)) == [
        "versions", "device", "model", "methods", "drafter", "canary", "memory", "sampling parameters",
    ]  # fmt: skip
    names = {finding["name"] for finding in report["findings"]}
    assert {"python", "torch", "transformers", "trl", "KV cache", "honoured", "min_p refused"} <= names
    assert any("log-probs under speculation" in name for name in names)


@pytest.mark.engine
def test_without_the_cpu_repair_it_fails_and_names_temperature(tiny_policy_dir):
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the fault is in vLLM's CPU backend")
    done = run("--model", tiny_policy_dir, "--dtype", "float32", **{SKIP_VARIABLE: "1"})
    assert done.returncode == 1, done.stderr[-3000:]
    failed = [line for line in done.stdout.splitlines() if line.strip().startswith("FAIL")]
    assert any("sampled distribution" in line and "with the temperature" in line for line in failed)


def test_versions_are_compared_with_the_metadata(monkeypatch):
    assert all(finding.ok for finding in check_versions())
    installed = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "1.15.0" if name == "trl" else installed(name))
    assert [finding.name for finding in check_versions() if not finding.ok] == ["trl"]


def test_a_policy_that_cannot_be_drafted_for(make_tiny_policy, tmp_path):
    directory = make_tiny_policy(tmp_path)
    assert all(finding.ok for finding in check_model(directory))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    (finding,) = check_model(directory)
    assert finding.ok is False and "auxiliary hidden states" in finding.value


def test_a_drafter_of_another_policy(make_tiny_policy, tmp_path):
    mine, other = make_tiny_policy(tmp_path / "mine"), make_tiny_policy(tmp_path / "other", vocab_size=48)
    made = str(tmp_path / "drafter")
    for drafter in (None, made):
        (finding,) = check_drafter(other, drafter, made)
        assert finding.ok
    (finding,) = collect("drafter", lambda: check_drafter(mine, made, ""))
    assert not finding.ok and "vocab_size" in finding.value


def test_table_names_what_failed():
    table = as_table([Finding("a", "good", "1", True), Finding("a", "told", "2"), Finding("b", "bad", "3", False)])
    assert table.splitlines()[0] == "a"
    assert "FAIL  bad" in table and table.endswith("1 problems: bad")
    assert as_table([Finding("a", "good", "1", True)]).endswith("Everything is as it must be.")
