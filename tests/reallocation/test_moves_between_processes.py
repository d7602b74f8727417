"""Two processes with an engine each: samples of the one run on the other and come back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.conftest import ROOT, environment_of_its_own, save_tiny_policy
from tests.idle.test_two_processes import train
from tests.lossless.lossless_tools import SIGNIFICANCE, rollout_p_value, trained_drafter
from tests.tolerance import logprob_tolerance

from tlt_trl.generation.standalone import free_port


pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.processes]


def run(policy_dir, drafter_dir, **options):
    """What both ranks have printed."""
    script = str(Path(__file__).with_name("rank_script.py"))
    command = [str(free_port()), policy_dir, drafter_dir, json.dumps(options)]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment_of_its_own() | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    results = []
    for process in ranks:
        try:
            output, errors = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            for other in ranks:
                other.kill()
            raise
        assert process.returncode == 0, errors[-4000:]
        results.append(json.loads(output.splitlines()[-1]))
    return results


@pytest.fixture(scope="module")
def rollouts(predictable_policy, tmp_path_factory):
    policy, policy_dir = predictable_policy
    drafter_dir = str(tmp_path_factory.mktemp("drafter"))
    trained_drafter(policy).save_pretrained(drafter_dir)
    options = {"samples": [8, 0], "max_tokens": 480, "rollouts": 2, "seconds_per_sample": 0.004}
    return run(policy_dir, drafter_dir, **options)


class TestTwoProcesses:
    def test_samples_move(self, rollouts):
        first, second = rollouts
        assert all(rollout["metrics"]["tlt/reallocation/samples"] >= 2 for rollout in first)
        assert all(rollout["metrics"]["tlt/reallocation/guests_s"] > 0 for rollout in second)
        assert all(rollout["metrics"]["tlt/reallocation/samples"] == 0 for rollout in second)

    def test_all_completions_come_back_in_their_order(self, rollouts):
        for seed, rollout in enumerate(rollouts[0]):
            prompts = torch.randint(4, 32, (8, 4), generator=torch.Generator().manual_seed(seed)).tolist()
            assert [sample["prompt"] for sample in rollout["samples"]] == prompts
            assert [len(sample["token_ids"]) for sample in rollout["samples"]] == [480] * 8
        assert all(rollout["samples"] == [] for rollout in rollouts[1])

    def test_log_probs_are_the_policys_and_tokens_follow_it(self, rollouts, predictable_policy):
        policy, _ = predictable_policy
        samples = [sample for rollout in rollouts[0] for sample in rollout["samples"]]
        prompts, tokens = [s["prompt"] for s in samples], [s["token_ids"] for s in samples]
        ids = torch.cat([torch.tensor(prompts), torch.tensor(tokens)], dim=1)
        with torch.no_grad():
            expected = policy(ids).logits[:, 3:-1].log_softmax(-1).gather(-1, ids[:, 4:, None])[..., 0]
        returned = torch.tensor([s["logprobs"] for s in samples])
        assert (expected - returned).abs().max() < 8 * logprob_tolerance()  # rows are eight times as long
        assert rollout_p_value(policy, prompts, tokens, temperature=1.0) > SIGNIFICANCE


def test_a_run_of_the_trainer_exchanges_descriptions_and_ends(tmp_path):
    """Its rollouts are too short for a plan; what shows is that ranks serve, wait and end together in every step."""
    policy = save_tiny_policy(tmp_path / "policy", vocab_size=64, num_layers=2)
    results, _ = train(policy, tmp_path / "run", sample_reallocation="prefill")
    for result in results:
        assert len(result["logs"]) == 3
    for log in results[0]["logs"]:
        assert log["tlt/reallocation/samples"] == 0.0 < log["tlt/reallocation/time_s"]
        assert log["tlt/idle_s"] > 0.2
