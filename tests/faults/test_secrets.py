"""
Kind of fault: secrets and data leave the machine with what is pushed.
"""

import json
import logging
import secrets
import string
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from tests.drafter.conftest import make_drafter, make_policy, policy  # noqa: F401
from transformers import trainer as transformers_trainer

from tlt_trl import upstream
from tlt_trl.drafter.checkpoint import DrafterSnapshot, run_facts
from tlt_trl.drafter.hub import BackgroundPusher
from tlt_trl.drafter.policy_uploads import PUSH_BUFFER_VARIABLE, PolicyUploads
from tlt_trl.drafter.privacy import SecretsFoundError, looks_random, options_only, refuse_secrets
from tlt_trl.drafter.training_state import CheckpointWriter, load_training_state, what_is_missing


V = "correct-horse-7Qz"  # no form that gives it away


class TestCommandLine:
    @pytest.mark.parametrize(
        "words",
        [
            ["--api-key", V],
            ["--api_key=" + V],
            ["--judge-api-key=" + V],
            ["--hub-token", V],
            ["--hub_token", V],
            ["--auth-token", V],
            ["--db-password", V],
            ["--openai_key", V],
            ["--wandb_key", V],
            ["--wandb-api-key=" + V],
            ["--secret", V],
            ["--judge.credentials", V],
            # Named by nobody.
            ["judge.api_key=" + V],
            ["+env.PASSWORD=" + V],
            ["-k", V],
            ["-p" + V],
            ["--header", f"Authorization: Bearer {V}"],
            ["--dsn", f"postgres://user:{V}@host/db"],
            ["--password:" + V],
            ["--api-key", "-" + V],
            ["--bf16", V],
            ["--seed", V],
            ["--seed=" + V],
            ["--seed", "7", V],
            [V],
            ["--vllm_engine_kwargs", json.dumps({"hf_token": V})],
        ],
    )
    def test_no_value_is_kept(self, words, monkeypatch):
        monkeypatch.setattr("sys.argv", ["/home/somebody/train.py", "--max_steps", "8", *words, "--beta", "1e-3"])
        command = run_facts()["command"]
        assert V not in json.dumps(command) and "somebody" not in json.dumps(command)
        assert command[:3] == ["train.py", "--max_steps", "8"] and command[-2:] == ["--beta", "1e-3"]

    def test_what_is_kept(self):
        command = ["train.py", "--learning-rate=5e-6", "--use_vllm", "True", "--model", "somebody/policy", "-v"]
        assert options_only(command) == ["train.py", "--learning-rate=5e-6", "--use_vllm", "True", "--model", "-v"]
        assert options_only([]) == []


def drawn(length, letters=string.ascii_letters + string.digits):
    """A word as a generator of keys makes it, with a digit in every place where chance could have left all out."""
    return "".join(secrets.choice(letters) + ("7" if place % 6 == 5 else "") for place in range(length))


@pytest.fixture
def folder(tmp_path):
    """What a push of a drafter holds, as it is."""
    facts = {
        "policy": "/cache/models--somebody--Qwen2.5-0.5B-Instruct/snapshots/989aa7980e4cf806f80c7fef2b1adb7bc71aa306",
        "policy_revision": "989aa7980e4cf806f80c7fef2b1adb7bc71aa306",
        "versions": {"torch": "2.13.0+cpu"},
        "command": ["train.py", "--hub_token", "--max_steps", "8"],
        "acceptance_by_position": [0.75, 0.5],
    }
    (tmp_path / "provenance.json").write_text(json.dumps(facts))
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "eos_token": "</s>"})
    )
    (tmp_path / "README.md").write_text(
        "| revision of the policy | 989aa7980e4cf806f80c7fef2b1adb7bc71aa306 |\n"
        "[run](https://www.comet.com/somebody/grpo/3a9f1c5e7b2d4f6081a3c5e7f9b1d3e5)\n"
    )
    (tmp_path / "model.safetensors").write_bytes(b"\0" + secrets.token_bytes(1000))
    return tmp_path


def add_fact(folder, **facts):
    path = folder / "provenance.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


class TestScan:
    def test_what_we_write_is_pushed(self, folder):
        refuse_secrets(folder)

    @pytest.mark.parametrize(
        "value",
        [
            drawn(32),
            drawn(40),
            secrets.token_hex(20),
            "hf_" + drawn(30),
            "sk-proj-" + drawn(40),
            "ghp_" + drawn(36),
            "AKIAIOSFODNN7EXAMPLE",
            "postgres://user:pass@host/db",
            "-----BEGIN OPENSSH PRIVATE KEY-----",
            f"/mnt/{drawn(32)}/policy",
        ],
        # Every process that collects the tests draws other values.
        ids=["short", "long", "hex", "hub", "api", "forge", "cloud", "database", "file", "path"],
    )
    def test_what_looks_like_a_key_is_named_without_its_value(self, folder, value):
        add_fact(folder, judge={"endpoint": ["a", value]})
        with pytest.raises(SecretsFoundError, match=r"provenance.json, judge.endpoint\[1\]: ") as raised:
            refuse_secrets(folder)
        assert value not in str(raised.value)

    @pytest.mark.parametrize(
        "name",
        ["OPENAI_API_KEY", "PGPASSWORD", "DB_PWD", "WANDB_KEY", "GITHUBTOKEN", "SLACK_AUTH", "AWS_SECRET_ACCESS_KEY"],
    )
    def test_values_of_the_environment_are_known(self, folder, name, monkeypatch):
        monkeypatch.setenv(name, V)
        refuse_secrets(folder)
        (folder / "notes.txt").write_text(f"first\nendpoint={V}\n")
        with pytest.raises(SecretsFoundError, match=f"notes.txt, line 2: the value of .* {name}") as raised:
            refuse_secrets(folder)
        assert V not in str(raised.value)
        refuse_secrets(folder, ["notes*"])

    def test_names_that_only_sound_like_it_and_short_words_are_no_secrets(self, folder, monkeypatch):
        add_fact(folder, where=str(folder), switch="disabled", text="a passage in password-free English")
        for name, value in {
            "PWD": str(folder),
            "WANDB_API_KEY": "disabled",
            "TOKENIZERS_PARALLELISM": "false",
        }.items():
            monkeypatch.setenv(name, value)
        refuse_secrets(folder)

    @pytest.mark.parametrize("name", ["api_key", "judge_password", "hub_token", "privateKey"])
    def test_a_fact_that_calls_itself_a_secret(self, folder, name):
        add_fact(folder, **{name: "hunter2"})
        with pytest.raises(SecretsFoundError, match=f"provenance.json, {name}: the name of a secret"):
            refuse_secrets(folder)
        add_fact(folder, **{name: "<HUB_TOKEN>"})
        refuse_secrets(folder)

    def test_a_key_that_is_one_itself_is_not_shown(self, folder, monkeypatch):
        monkeypatch.setenv("JUDGE_TOKEN", V)
        add_fact(folder, used={V: 3, "by": {V: "judge"}})
        with pytest.raises(SecretsFoundError, match="used, a key: the value of") as raised:
            refuse_secrets(folder)
        assert V not in str(raised.value)

    def test_vocabularies_may_be_odd_but_hold_no_token(self, folder):
        vocabulary = {"Ġ3a9f1c5e7b2d4f6081a3c5e7f9b1d3e5": 5}
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        refuse_secrets(folder)
        (folder / "vocab.json").write_text(json.dumps(vocabulary | {"hf_" + "a1B2" * 8: 6}))
        with pytest.raises(SecretsFoundError, match="vocab.json, a key: the form of an access token"):
            refuse_secrets(folder)

    def test_names_of_classes_are_not_random(self):
        for name in (
            "LlamaForCausalLMEagle3",
            "Qwen3NextForCausalLM",
            "DeepSeekR1DistillQwen32B",
            "checkpoint20261201",
        ):
            assert not looks_random(name), name


class TestPushOfTheDrafter:
    def test_is_refused(self, make_drafter, monkeypatch):  # noqa: F811
        monkeypatch.setenv("JUDGE_API_KEY", V)
        with pytest.raises(SecretsFoundError, match="provenance.json, judge: the value of .* JUDGE_API_KEY"):
            make_drafter().push_to_hub("somebody/drafter", token="hf_standin", provenance={"judge": V})

    def test_the_token_of_the_push_is_known_too(self, make_drafter):  # noqa: F811
        with pytest.raises(SecretsFoundError, match="the value of the token of this push"):
            make_drafter().push_to_hub("somebody/drafter", token=V, provenance={"judge": f"?key={V}"})

    def test_in_the_background_it_stops_nothing_and_proposes_no_way_round(self, make_drafter, caplog):  # noqa: F811
        pusher = BackgroundPusher("somebody/drafter", token="hf_standin")
        with caplog.at_level(logging.ERROR):
            pusher.push(DrafterSnapshot.of(make_drafter()), {"db_password": V}, [], "step 1", "output/drafter")
            pusher.join()
        assert "provenance.json, db_password: the name of a secret" in caplog.text
        assert V not in caplog.text and "To repeat the push" not in caplog.text


class RecordingApi:
    """The Hub as transformers sees it."""

    def __init__(self):
        self.pushed = []

    def create_repo(self, name, **kwargs):
        return SimpleNamespace(repo_id=name)

    def upload_folder(self, *, folder_path, ignore_patterns=(), **kwargs):
        files = sorted(str(path.relative_to(folder_path)) for path in folder_path.rglob("*") if path.is_file())
        self.pushed.append(list(filter_repo_objects(files, ignore_patterns=list(ignore_patterns))))
        done = Future()
        done.set_result(None)
        return done


@pytest.fixture
def hub(monkeypatch):
    api = RecordingApi()
    monkeypatch.setattr(transformers_trainer, "hf_api", lambda: api)
    return api


def push(folder, hub_token=None, uploads=None, **kwargs):
    """As `Trainer._push_from_checkpoint` does it."""
    with upstream.uploads_through(PolicyUploads(hub_token) if uploads is None else uploads):
        return transformers_trainer.hf_api().upload_folder(folder_path=folder, repo_id="somebody/policy", **kwargs)


@pytest.fixture
def checkpoint(tmp_path, make_drafter):  # noqa: F811
    """A checkpoint with the state of two ranks, and the pickle in which transformers keeps its arguments."""
    state = {"online_drafter": {"tokens_trained": 5}, "buffer": {"entries": [{"input_ids": torch.arange(7)}]}}
    folder = tmp_path / "checkpoint-4" / "drafter"
    writers = [CheckpointWriter(rank, [0, 1]) for rank in (0, 1)]
    writers[0].clear(folder)
    writers[1].start(folder, state)
    writers[0].start(folder, state, DrafterSnapshot.of(make_drafter()), {"policy": "tiny"})
    for writer in writers:
        writer.join()
    torch.save({"hub_token": "hf_secret"}, folder.parent / "training_args.bin")
    return folder.parent


class TestPushOfWholeCheckpoints:
    def test_the_buffer_stays_here_and_that_is_said_once(self, checkpoint, hub, caplog):
        uploads = PolicyUploads(None)
        for _ in range(2):
            push(checkpoint, uploads=uploads, run_as_future=True)
        for files in hub.pushed:
            assert "training_args.bin" in files and "drafter/training/rank_1.pt" in files
            assert not any("buffer" in file for file in files)
        assert caplog.text.count("prompts and answers as token ids, is left out of pushed checkpoints") == 1

    def test_a_run_goes_on_from_what_was_pushed(self, checkpoint, hub):
        push(checkpoint)
        for file in set(checkpoint.rglob("*.*")) - {checkpoint / name for name in hub.pushed[0]}:
            file.unlink()
        assert what_is_missing(checkpoint / "drafter") is None
        state = load_training_state(checkpoint / "drafter", 1, [0, 1])
        assert state["online_drafter"]["tokens_trained"] == 5 and "buffer" not in state

    def test_an_option_puts_it_in(self, checkpoint, hub, monkeypatch):
        monkeypatch.setenv(PUSH_BUFFER_VARIABLE, "1")
        push(checkpoint)
        assert {"drafter/training/buffer_0.pt", "drafter/training/buffer_1.pt"} <= set(hub.pushed[0])

    def test_the_pickle_with_the_token_stays_here(self, checkpoint, hub):
        push(checkpoint, hub_token="hf_secret")
        assert "training_args.bin" not in hub.pushed[0] and "drafter/config.json" in hub.pushed[0]

    def test_a_secret_stops_the_push_and_not_the_run(self, checkpoint, hub, caplog):
        (checkpoint / "README.md").write_text(f"key: {V}")
        refused = push(checkpoint, hub_token=V, run_as_future=True)
        assert refused.done() and isinstance(refused.exception(), SecretsFoundError)
        assert "README.md, line 1: the value of `hub_token`" in caplog.text and V not in caplog.text
        with pytest.raises(SecretsFoundError):
            push(checkpoint, hub_token=V)
        assert hub.pushed == []

    def test_what_is_not_pushed_anyway_is_not_looked_at(self, checkpoint, hub):
        (checkpoint / "_notes.md").write_text("password for everybody: hf_" + "a1B2" * 8)
        push(checkpoint, ignore_patterns=["_*"])
        assert hub.pushed and "_notes.md" not in hub.pushed[0]
