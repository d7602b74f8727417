"""The trainer on two real processes, each with its own engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.conftest import ROOT, environment_of_its_own, save_tiny_policy

from tlt_trl.telemetry.timeline import DRAFTER_TRAINING, MERGING, POLICY_TRAINING, WAITING, read_timelines


pytestmark = [pytest.mark.engine, pytest.mark.processes]


def train(policy, output_dir, **options):
    """Results of both ranks and the policy's weights afterwards."""
    output_dir.mkdir()
    environment = environment_of_its_own() | {"OMP_NUM_THREADS": "1"}
    config = ROOT / "accelerate_configs" / "cpu_2_processes.yaml"
    command = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--main_process_port", "0"]
    script = str(Path(__file__).with_name("policy_script.py"))
    done = subprocess.run(
        [sys.executable, *command, script, policy, str(output_dir), json.dumps(options)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results = [json.loads((output_dir / f"result_{rank}.json").read_text()) for rank in range(2)]
    weights = [torch.load(output_dir / f"policy_{rank}.pt") for rank in range(2)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    return results, weights[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    policy = save_tiny_policy(folder / "policy", vocab_size=64, num_layers=2)
    with_training = train(policy, folder / "on", log_timeline=True)
    without = train(policy, folder / "off", drafter_training=False)
    return folder, with_training, without


class TestTwoProcesses:
    def test_the_policy_does_not_depend_on_idle_training(self, runs):
        folder, (on, policy_on), (off, policy_off) = runs
        assert on[0]["drafter_moved"] and not off[0]["drafter_moved"]
        assert [log["reward"] for log in on[0]["logs"]] == [log["reward"] for log in off[0]["logs"]]
        assert len(on[0]["logs"]) == 3
        assert all(torch.equal(policy_on[name], policy_off[name]) for name in policy_on)
        # The comparison is worth something only if the policy moved.
        from transformers import AutoModelForCausalLM

        start = AutoModelForCausalLM.from_pretrained(folder / "policy").state_dict()
        assert any((start[name].float() - policy_on[name].float()).abs().max() > 1e-4 for name in start)

    def test_both_ranks_hold_the_same_drafter(self, runs):
        _, (on, _), _ = runs
        assert on[0]["drafter_sum"] == on[1]["drafter_sum"]

    def test_the_wait_is_used_and_measured(self, runs):
        _, (on, _), _ = runs
        first, *later = on[0]["logs"]
        assert first["tlt/drafter_tokens"] == 0.0  # no features yet
        for log in later:
            # The first rank waits half a second, the second one next to nothing: the mean is a quarter.
            assert 0.2 < log["tlt/idle_s"] < 1.0
            assert log["tlt/idle_used_fraction"] > 0.5
            assert 0.0 <= log["tlt/stop_latency_s"] < 0.2 and log["tlt/stop_latency_s"] <= log["tlt/idle_added_s"]
            assert log["tlt/drafter_tokens"] > 0 and log["tlt/feature_capture_s"] > 0
            assert log["tlt/alarm/drafter_training_failed"] == 0.0

    def test_the_timeline_has_both_ranks_on_one_clock(self, runs):
        first, second = read_timelines(runs[0] / "on" / "timeline")
        assert (first.num_ranks, second.rank) == (2, 1)
        assert max(first.zero_error_s, second.zero_error_s) < 0.1
        names = {interval.name for interval in first.intervals}
        assert {WAITING, DRAFTER_TRAINING, MERGING, POLICY_TRAINING} <= names
        # Ranks begin to merge when both have finished, which only a common clock shows.
        merges = [[i.start_s for i in timeline.intervals if i.name == MERGING] for timeline in (first, second)]
        assert len(merges[0]) == len(merges[1]) == 3
        assert all(abs(one - other) < 0.4 for one, other in zip(*merges, strict=True))
        for timeline in (first, second):
            for before, after in zip(timeline.intervals, timeline.intervals[1:], strict=False):
                assert before.end_s <= after.start_s + 1e-5


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_train_one_policy_after_an_evaluation(tmp_path, bf16):
    policy = save_tiny_policy(tmp_path / "policy", vocab_size=64, num_layers=2)
    results, _ = train(policy, tmp_path / "run", evaluate_first=True, bf16=bf16)  # which compares the ranks' weights
    norms = [[log["grad_norm"] for log in result["logs"]] for result in results]
    assert norms[0] == norms[1] and len(norms[0]) == 3
