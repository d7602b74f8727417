"""Prompts of `tlt-trl warmup`, from a file of its own kind or from whatever `datasets.load_dataset` takes."""

import json

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from tlt_trl.tools import prompts as prompts_module
from tlt_trl.tools.cli import main
from tlt_trl.tools.prompts import read_dataset_prompts, read_prompts


ROWS = [{"prompt": "w5 w6"}, {"prompt": "w7"}]


@pytest.fixture
def tokenizer(tiny_policy_dir):
    return AutoTokenizer.from_pretrained(tiny_policy_dir)


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_file_folder_and_parquet_hold_the_same(tokenizer, jsonl, tmp_path):
    expected = read_prompts(jsonl, tokenizer)
    assert expected == [[5, 6], [7]]
    assert read_dataset_prompts(str(jsonl), "train", "prompt", tokenizer) == expected
    (tmp_path / "folder").mkdir()
    jsonl.rename(tmp_path / "folder" / "train.jsonl")
    assert read_dataset_prompts(str(tmp_path / "folder"), "train", "prompt", tokenizer) == expected
    Dataset.from_list([{"question": row["prompt"]} for row in ROWS]).to_parquet(tmp_path / "rows.parquet")
    assert read_dataset_prompts(str(tmp_path / "rows.parquet"), "train", "question", tokenizer) == expected


def test_a_large_data_set_is_sampled(tokenizer, tmp_path, monkeypatch):
    Dataset.from_list([{"prompt": f"w{5 + i}"} for i in range(50)]).to_parquet(tmp_path / "rows.parquet")
    monkeypatch.setattr(prompts_module, "MAX_DATASET_PROMPTS", 10)
    prompts = read_dataset_prompts(str(tmp_path / "rows.parquet"), "train", "prompt", tokenizer)
    assert len({ids[0] for ids in prompts}) == 10 and prompts != sorted(prompts)


def test_wrong_column_and_file_are_named(tokenizer, jsonl, tmp_path):
    with pytest.raises(ValueError, match="no column 'question', only \\['prompt'\\].*--prompt_column"):
        read_dataset_prompts(str(jsonl), "train", "question", tokenizer)
    (tmp_path / "prompts.txt").write_text("w5")
    with pytest.raises(ValueError, match="must end in .json, .jsonl, .parquet"):
        read_dataset_prompts(str(tmp_path / "prompts.txt"), "train", "prompt", tokenizer)


def test_one_source_of_prompts_is_needed(capsys):
    for given in ([], ["--prompts", "a.jsonl", "--dataset", "b"]):
        with pytest.raises(SystemExit):
            main(["warmup", "--model", "policy", "--output", "drafter", *given])
    assert "one of the arguments --prompts --dataset is required" in capsys.readouterr().err
