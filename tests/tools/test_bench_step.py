import json
import statistics
import subprocess
import sys
from contextlib import contextmanager
from multiprocessing import Pipe

import pytest
from tests.conftest import environment_of_its_own

from tlt_trl.tools.cli import main
from tlt_trl.tools.step_summary import (
    TimedStep,
    TrainingCost,
    amdahl_bound,
    below_from_step,
    format_summary,
    median_interval,
    summarise,
)


def step(rollout_s, rest_s, drafter_s=0.0, tokens=100, **logs):
    """Four answers, of 25 tokens each if nothing else is said, to prompts of 25 tokens."""
    return TimedStep(
        seconds=rollout_s + rest_s + drafter_s,
        rollout_s=rollout_s,
        sync_s=0.0,
        prompt_lengths=[25] * 4,
        lengths=[tokens // 4] * 4,
        logs={"tlt/drafter/time_s": drafter_s, "entropy": 0.5} | logs,
    )


def compared(plain, speculative, warmup_rounds=0, max_noise=0.1):
    startup_s = {"plain": 1.0, "speculative": 2.0}
    return summarise({"plain": plain, "speculative": speculative}, warmup_rounds, max_noise, startup_s)


def test_amdahl_bound():
    assert amdahl_bound(0.5, 2.0) == pytest.approx(4 / 3)
    assert amdahl_bound(0.2, 1.0) == 1.0


def test_interval_of_the_median():
    assert median_interval([5, 1, 4, 2, 3]) == (1, 5, 1 - 2 / 32)
    low, high, coverage = median_interval(range(10))
    assert (low, high) == (1, 8) and coverage == pytest.approx(1 - 2 * 11 / 1024)
    assert median_interval([2.0]) == (2.0, 2.0, 0.0)


def test_training_costs_what_the_padded_batch_costs():
    steps = [step(1.0, 1.0 + tokens / 100, tokens=tokens) for tokens in (40, 80, 100, 200)]
    cost = TrainingCost(steps)
    assert [cost.excess(s) for s in steps] == pytest.approx([1.0] * 4)
    slower = step(1.0, 3.0, drafter_s=0.5, tokens=100)  # 2 s would be right
    assert cost.excess(slower) == pytest.approx(1.5)
    # With the answers of another step twice the tokens, and 1 + 2 s of training; the drafter's time is what it is.
    assert cost.seconds_at(slower, steps[-1]) == pytest.approx(2.0 + 1.5 * 3.0 + 0.5)


def test_noise_is_that_between_neighbours():
    rest_s = [1.0 * 1.1**i for i in range(6)]  # a drift of 10 % a step
    steps = [step(1.0, s) for s in rest_s]
    assert TrainingCost(steps).noise(steps) == pytest.approx(0.1)
    # A rollout may take what it takes, and longer answers may train longer.
    steps = [step(rollout_s, 1.0 + rollout_s, tokens=int(100 * rollout_s)) for rollout_s in (1.0, 3.0, 2.0)]
    assert TrainingCost(steps).noise(steps) == pytest.approx(0.0, abs=1e-9)


def test_below_from_step():
    assert below_from_step([2, 3, 4], [1, 4, 5]) == 2
    assert below_from_step([0, 4, 4], [1, 4, 5]) == 3
    assert below_from_step([0, 5], [1, 5]) is None


def test_summary_of_known_steps():
    # The rollout is half of the plain step and twice as fast here; training the drafter takes a tenth of it.
    plain, speculative = [step(1.0, 1.0)] * 5, [step(0.5, 1.0, 0.2, **{"tlt/acceptance_length": 3.0})] * 5
    summary = compared(plain, speculative)
    assert summary["rollout_share"] == 0.5 and summary["rollout_speedup"] == 2.0
    assert summary["amdahl_bound"] == pytest.approx(4 / 3, abs=1e-4)
    assert summary["step_speedup"] == summary["accumulated_speedup"] == pytest.approx(2.0 / 1.7, abs=1e-4)
    assert summary["step_speedup_per_token"] == summary["step_speedup_in_seconds"] == summary["step_speedup"]
    assert summary["share_of_bound"] == pytest.approx(1.5 / 1.7, abs=1e-4)
    assert summary["rest_ratio"] == 1.0 and summary["noise"] == 0.0
    assert summary["below_plain_from_step"] == summary["below_plain_in_seconds_from_step"] == 1
    assert summary["conclusive"] and summary["verdict"] == "faster: 1.176x of plain TRL (1.176 to 1.176)"
    assert summary["speculative"]["tlt/drafter/time_s"] == 0.2
    assert summary["speculative"]["tlt/acceptance_length"] == 3.0
    assert summary["plain"]["length_p95"] == 25.0 and summary["plain"]["startup_s"] == 1.0
    assert "| step, s | 2 | 1.7 |" in format_summary(summary)


def test_longer_answers_are_not_slower_steps():
    # Rollouts of 1 s per 100 tokens; training costs 1 s and another per 100 tokens. The second trainer gains a tenth.
    lengths = (100, 200, 140, 60, 180)
    plain = [step(n / 100, 1 + n / 100, tokens=n) for n in lengths]
    speculative = [step(0.9 * n / 100, 1 + n / 100, tokens=n) for n in reversed(lengths)]
    summary = compared(plain, speculative)
    expected = statistics.median((1 + n / 50) / (1 + 1.9 * n / 100) for n in lengths)
    assert summary["step_speedup"] == pytest.approx(expected, abs=1e-4)
    # What is left of it per token and in seconds is chance.
    low, high = summary["step_speedup_in_seconds_interval"]
    assert low < 0.7 and high > 1.5
    low, high = summary["step_speedup_per_token_interval"]
    assert low < 0.8 and high > 1.3
    assert summary["rest_ratio"] == 1.0 and summary["verdict"].startswith("faster: 1.038x")


def test_warm_up_counts_in_accumulated_times_only():
    # Starts three seconds behind and gains one a step, on the clock; half of that from shorter answers.
    speculative = [step(1.0, 4.0)] + [step(0.2, 0.8, tokens=40)] * 7
    summary = compared([step(1.0, 1.0)] * 8, speculative, warmup_rounds=1)
    assert summary["rounds"] == 7
    assert summary["below_plain_in_seconds_from_step"] == 5
    assert summary["accumulated_s"] == {"plain": 16.0, "speculative": 12.0}
    # With answers as long as plain TRL's: 0.5 s and, since that is all that training costs there, 1 s.
    assert summary["step_speedup"] == pytest.approx(2.0 / 1.5, abs=1e-4)
    assert summary["below_plain_from_step"] == 8 and summary["accumulated_speedup"] == pytest.approx(
        16 / 15.5, abs=1e-4
    )


def test_a_noisy_machine_gives_no_conclusion():
    plain = [step(1.0, s) for s in (1.0, 1.5, 1.0, 1.5, 1.0)]
    summary = compared(plain, [step(0.1, 0.1)] * 5)
    assert not summary["conclusive"] and "too noisy" in summary["verdict"] and "50%" in summary["verdict"]
    assert compared(plain, [step(0.1, 0.1)] * 5, max_noise=0.6)["conclusive"]


def test_too_few_rounds_give_no_conclusion():
    summary = compared([step(1.0, 1.0)] * 4, [step(0.1, 0.1)] * 4)
    assert not summary["conclusive"] and "4 rounds, at least 5" in summary["verdict"]


def test_missing_cases_say_how_to_make_them(tmp_path):
    with pytest.raises(SystemExit, match="benchmarks/step.py"):
        main(["bench", "step", "--cases", str(tmp_path / "cases.json")])


def test_unknown_workload_is_named(tmp_path):
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([{"name": "tiny", "model": "", "dataset": "", "reward": ""}]))
    with pytest.raises(SystemExit, match="no workload demo, only tiny"):
        main(["bench", "step", "--cases", str(cases), "--workloads", "demo"])


def test_the_time_of_the_other_trainer_is_a_pause():
    from tlt_trl.tools.step_trainer import Turns

    bench, trainer = Pipe()
    turns, events = Turns(trainer), []

    @contextmanager
    def pause():
        events.append("pause")
        yield
        # By now the other trainer may have had its turn: the step was reported, and the next message has come.
        events.append("reported" if bench.poll() else "nothing reported")

    turns.pause = pause
    for _ in range(3):
        bench.send("go on")
    turns.on_train_begin(None, None, None)
    assert events == []
    for number in (1, 2):
        turns.note_sync(0.25)
        turns.note_rollout(0.5, [[5, 6]], [[7] * number])
        turns.on_step_end(None, None, None)
        reported = bench.recv()
        assert reported.pop("seconds") > 0.0
        # Nothing is left of the step before.
        assert reported == {"rollout_s": 0.5, "sync_s": 0.25, "prompt_lengths": [2], "lengths": [number]}
    assert events == ["pause", "reported"] * 2


def test_reward_function_of_a_file(tmp_path):
    from tlt_trl.tools.step_trainer import load_function

    (tmp_path / "reward.py").write_text("def reward(): return 3")
    assert load_function(f"{tmp_path / 'reward.py'}:reward")() == 3
    for name in ("reward", "none.py:reward", f"{tmp_path}:reward"):
        with pytest.raises(ValueError, match="file.py:function"):
            load_function(name)


def test_one_round_is_refused(tmp_path):
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps([{"name": "tiny", "model": "", "dataset": "", "reward": ""}]))
    with pytest.raises(SystemExit, match="at least 2"):
        main(["bench", "step", "--cases", str(cases), "--rounds", "1"])


REWARD = """
def reward(completions, **kwargs):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]
"""


@pytest.fixture
def tiny_case(tiny_policy_dir, tmp_path):
    """A workload of a tiny policy, and what its reward function sees of the process that it runs in."""
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"w{5 + i} w{9 + i % 20} w7"}) + "\n" for i in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    return {
        "name": "tiny",
        "model": tiny_policy_dir,
        "dataset": str(tmp_path / "prompts.jsonl"),
        "reward": f"{tmp_path / 'reward.py'}:reward",
        "config": {
            "use_cpu": True,
            "bf16": False,
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 8,
            "vllm_max_model_length": 64,
        },
        # Nothing that such a policy saves would pay for training, which has no price with a fixed strategy.
        "tlt": {"drafter_time_budget": 0.5, "speculation_selector": "fixed"},
        "engine": {"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 2**26},
        "warmup_rounds": 1,
        "rounds": 2,
    }


def run_bench(case, folder, *arguments):
    (folder / "cases.json").write_text(json.dumps([case]))
    command = [sys.executable, "-m", "tlt_trl.tools.cli", "bench", "step", "--cases", str(folder / "cases.json")]
    environment = environment_of_its_own() | {"RANK": "1", "WORLD_SIZE": "2"}  # of a pod; nobody else is there
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.engine
def test_steps_of_a_tiny_policy(tiny_case, tmp_path):
    raw = tmp_path / "raw.json"
    done = run_bench(tiny_case, tmp_path, "--json", "--output", str(raw))
    assert done.returncode == 0, done.stderr
    (summary,) = json.loads(done.stdout.splitlines()[-1])["workloads"]
    assert summary["workload"] == "tiny" and summary["rounds"] == 2 and not summary["conclusive"]
    assert 0.0 < summary["rollout_share"] < 1.0 and summary["amdahl_bound"] > 0.0
    (measured,) = json.loads(raw.read_text())["workloads"]
    for name, steps in measured["steps"].items():
        assert len(steps) == 3
        for timed in steps:
            assert 0.0 < timed["rollout_s"] + timed["sync_s"] < timed["seconds"]
            assert len(timed["lengths"]) == len(timed["prompt_lengths"]) == 4 and max(timed["lengths"]) <= 8
            # In float32 the engine and the policy agree: the plain engine gets every update as well.
            assert timed["logs"]["sampling/sampling_logp_difference/max"] < 1e-3
            # Of the same step: TRL logs the mean length too.
            assert sum(timed["lengths"]) / 4 == pytest.approx(timed["logs"]["completions/mean_length"])
            assert ("tlt/acceptance_length" in timed["logs"]) == (name == "speculative")
    plain, speculative = measured["steps"]["plain"], measured["steps"]["speculative"]
    assert [len(s["prompt_lengths"]) for s in plain] == [len(s["prompt_lengths"]) for s in speculative]
    assert sum(timed["logs"]["tlt/drafter/steps"] for timed in speculative) > 0


@pytest.mark.engine
def test_a_trainer_that_fails_ends_the_other(tiny_case, tmp_path):
    tiny_case["tlt"] = {"speculation_selector": "none"}
    done = run_bench(tiny_case, tmp_path)
    assert done.returncode == 1
    assert "`speculation_selector` must be one of" in done.stderr
    assert "The speculative trainer has ended with exit status 1" in done.stderr
