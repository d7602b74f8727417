import json
import subprocess
import sys

import pytest
import torch
from tests.conftest import environment_of_its_own
from transformers import AutoModelForCausalLM

from tlt_trl.drafter import Drafter
from tlt_trl.tools.bench import TimedRollout, compare_rollouts, format_table, speedup, strategy_table
from tlt_trl.tools.cli import main


def rollouts(*tokens_per_s):
    return [TimedRollout(seconds=2.0, lengths=(rate, rate)) for rate in tokens_per_s]


RESULTS = {
    "plain": rollouts(100, 100, 50),
    "eagle3 x1": rollouts(150, 130, 80),
    "eagle3 x3": rollouts(180, 200, 60),
    "adaptive": rollouts(190, 170, 100),
}


def test_speedup_is_the_median_of_the_rounds():
    assert speedup(RESULTS, "eagle3 x3", "plain") == 1.8
    assert speedup(RESULTS, "adaptive", "plain") == 1.9


def test_adaptive_is_compared_with_every_fixed_strategy():
    table = strategy_table(RESULTS, "plain", "adaptive")
    assert table["best_fixed"] == "eagle3 x3"
    assert table["adaptive_over_best_fixed"] == pytest.approx(190 / 180, abs=5e-4)
    assert table["adaptive_over_fixed"] == {"eagle3 x1": pytest.approx(1.267), "eagle3 x3": pytest.approx(1.056)}
    assert table["adaptive_over_plain"] == 1.9
    assert table["rows"][1] == {"name": "eagle3 x1", "tokens_per_s": 130.0, "speedup": 1.5}
    assert format_table(table).splitlines()[-1] == "| adaptive | 170.0 | 1.90 |"


def test_engines_take_turns():
    played = []

    def engine(name):
        return lambda prompts, seed: played.append((name, seed)) or [[1, 2]] * len(prompts)

    results = compare_rollouts({"a": engine("a"), "b": engine("b")}, [[5]], rounds=2, warmup_rounds=1, seed=7)
    assert played == [("a", 7), ("b", 7), ("b", 8), ("a", 8), ("a", 9), ("b", 9)]
    assert {name: len(rows) for name, rows in results.items()} == {"a": 2, "b": 2}
    assert results["a"][0].lengths == (2,)


def test_missing_cases_say_how_to_make_them(tmp_path):
    with pytest.raises(SystemExit, match="make bench-strategies"):
        main(["bench", "strategies", "--cases", str(tmp_path / "cases.json")])


@pytest.mark.engine
@pytest.mark.slow
def test_strategies_of_a_tiny_policy(tiny_policy_dir, tmp_path):
    policy = AutoModelForCausalLM.from_pretrained(tiny_policy_dir, dtype=torch.float32)
    Drafter.from_policy(policy).save_pretrained(tmp_path / "drafter")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w5 w6 w7"}\n{"prompt": "w9"}\n')
    case = {
        "name": "tiny",
        "model": tiny_policy_dir,
        "drafter": str(tmp_path / "drafter"),
        "prompts": str(prompts),
        "max_completion_length": 16,
    }
    (tmp_path / "cases.json").write_text(json.dumps([case]))
    arguments = ["--cases", str(tmp_path / "cases.json"), "--rounds", "1"]
    arguments += ["--strategies", "eagle3 x1", "eagle3 x2", "ngram x4"]
    raw = tmp_path / "raw.json"
    arguments += ["--warmup_rounds", "1", "--max_num_seqs", "2", "--json", "--output", str(raw)]
    # Two engines, whose memory goes with their process.
    command = [sys.executable, "-m", "tlt_trl.tools.cli", "bench", "strategies", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment_of_its_own())
    (table,) = json.loads(done.stdout.splitlines()[-1])["tables"]
    assert [row["name"] for row in table["rows"]] == ["plain", "off", "eagle3 x1", "eagle3 x2", "ngram x4", "adaptive"]
    measured = json.loads(raw.read_text())["cases"][0]["rollouts"]
    assert all(len(rows) == 1 and sum(rows[0]["lengths"]) > 2 for rows in measured["rollouts"].values())
    assert {row["strategy"] for row in measured["selector"]} == {"off", "eagle3 x1", "eagle3 x2", "ngram x4"}
