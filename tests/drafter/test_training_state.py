import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tlt_trl.drafter.checkpoint import DrafterSnapshot
from tlt_trl.drafter.training_state import (
    CheckpointWriter,
    cpu_copy,
    load_training_state,
    newest_whole_checkpoint,
    newest_whole_drafter,
    what_is_missing,
)


STATE = {"numbers": torch.arange(5), "names": ["a"]}


@pytest.fixture
def snapshot(make_drafter):
    return DrafterSnapshot.of(make_drafter())


def save(folder, snapshot, ranks=(0,), then=None):
    writer = CheckpointWriter(0, ranks)
    writer.clear(folder)
    writer.note_policy_saved(folder)
    writer.start(folder, STATE, snapshot, {"policy": "tiny"}, then)
    return writer


def save_checkpoint(output_dir, step, snapshot):
    folder = output_dir / f"checkpoint-{step}"
    save(folder / "drafter", snapshot).join()
    (folder / "trainer_state.json").write_text("{}")
    return folder


class TestCheckpointWriter:
    def test_round_trip(self, tmp_path, snapshot):
        save(tmp_path / "drafter", snapshot).join()
        assert what_is_missing(tmp_path / "drafter") is None
        state = load_training_state(tmp_path / "drafter", 0, [0])
        assert torch.equal(state["numbers"], STATE["numbers"]) and state["names"] == ["a"]
        assert not list(tmp_path.rglob("*.partial"))

    def test_stale_files_go(self, tmp_path, snapshot):
        (tmp_path / "drafter" / "training").mkdir(parents=True)
        (tmp_path / "drafter" / "training" / "rank_1.pt").write_text("of an earlier run")
        save(tmp_path / "drafter", snapshot).join()
        assert not (tmp_path / "drafter" / "training" / "rank_1.pt").exists()

    def test_older_checkpoints_go_when_all_ranks_have_saved(self, tmp_path, snapshot):
        called = threading.Event()
        first = save(tmp_path / "drafter", snapshot, ranks=[0, 1], then=called.set)
        while not (tmp_path / "drafter" / "training" / "complete.json").exists():
            time.sleep(0.01)
        assert not called.wait(timeout=0.3)
        assert load_training_state(tmp_path / "drafter", 0, [0, 1]) is None  # until all are there
        second = CheckpointWriter(1, [0, 1])
        second.start(tmp_path / "drafter", STATE)
        second.join()
        first.join()
        assert called.is_set()

    def test_a_deleted_checkpoint_is_not_made_again_and_the_failure_is_reported(self, tmp_path, snapshot):
        reports = []
        writer = CheckpointWriter(0, [0], reports.append)
        writer.start(tmp_path / "gone" / "drafter", STATE, snapshot, {})
        writer.join()
        assert not (tmp_path / "gone").exists()
        assert [report.folder for report in reports] == [tmp_path / "gone" / "drafter"]

    def test_weights_only(self, tmp_path, snapshot):
        writer = CheckpointWriter(0, [0])
        writer.clear(tmp_path / "drafter")
        writer.start(tmp_path / "drafter", None, snapshot, {})
        writer.join()
        assert what_is_missing(tmp_path / "drafter") is None
        assert load_training_state(tmp_path / "drafter", 0, [0]) is None

    def test_other_ranks_begin_anew(self, tmp_path, snapshot, caplog):
        save(tmp_path / "drafter", snapshot).join()
        assert load_training_state(tmp_path / "drafter", 0, [0, 1]) is None
        assert "ranks [0], this run has ranks [0, 1]" in caplog.text


def test_a_copy_does_not_follow():
    tensor = torch.zeros(3)
    copied = cpu_copy({"a": [tensor, 1], "b": {"c": tensor}})
    tensor.fill_(1.0)
    assert copied["a"][0].tolist() == copied["b"]["c"].tolist() == [0.0] * 3 and copied["a"][1] == 1


class TestNewestWholeCheckpoint:
    def test_takes_the_newest(self, tmp_path, snapshot):
        assert newest_whole_checkpoint(tmp_path) is None
        for step in (9, 10):
            save_checkpoint(tmp_path, step, snapshot)
        assert newest_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")

    def test_passes_over_a_policy_that_was_not_saved_to_the_end(self, tmp_path, snapshot, caplog):
        for step in (9, 10, 11, 12):
            save_checkpoint(tmp_path, step, snapshot)
        state = tmp_path / "checkpoint-10" / "trainer_state.json"
        state.write_bytes(state.read_bytes()[:-1])
        (tmp_path / "checkpoint-11" / "trainer_state.json").unlink()
        # The first rank's files are there, those of others may not be.
        CheckpointWriter(0, [0]).clear(tmp_path / "checkpoint-12" / "drafter")
        assert newest_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-9")
        for name in ("checkpoint-10/trainer_state.json", "checkpoint-11/trainer_state.json", "policy_saved"):
            assert f"{name} is missing" in caplog.text

    @pytest.mark.parametrize("file", ["training/complete.json", "model.safetensors"])
    def test_of_a_torn_drafter_only_the_policy_is_taken(self, tmp_path, snapshot, file, caplog):
        for step in (8, 9, 10):
            save_checkpoint(tmp_path, step, snapshot)
        (tmp_path / "checkpoint-10" / "drafter" / file).unlink()
        weights = tmp_path / "checkpoint-9" / "drafter" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        newest = newest_whole_checkpoint(tmp_path)
        assert newest == str(tmp_path / "checkpoint-10")
        assert newest_whole_drafter(newest) == str(tmp_path / "checkpoint-8" / "drafter")
        assert f"{Path(file).name} is missing" in caplog.text and "bytes instead of" in caplog.text

    def test_a_later_checkpoint_is_no_substitute(self, tmp_path, snapshot):
        for step in (9, 10):
            save_checkpoint(tmp_path, step, snapshot)
        (tmp_path / "checkpoint-9" / "drafter" / "model.safetensors").unlink()
        assert newest_whole_drafter(tmp_path / "checkpoint-9") is None

    def test_a_checkpoint_without_a_drafter_counts(self, tmp_path):
        (tmp_path / "checkpoint-3").mkdir()
        (tmp_path / "checkpoint-3" / "trainer_state.json").write_text("{}")
        assert newest_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")

    def test_none_whole(self, tmp_path):
        (tmp_path / "checkpoint-3").mkdir()
        with pytest.raises(ValueError, match="No checkpoint in .* is whole"):
            newest_whole_checkpoint(tmp_path)


@pytest.mark.processes
def test_killed_at_random_moments_every_resume_works(tmp_path):
    script = Path(__file__).with_name("kill_script.py")
    command = [sys.executable, str(script), str(tmp_path), "50", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    kills = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(kills) == 50, done.stderr[-3000:]
    # The test is worth something only if the kills do come in the middle of saving …
    assert sum(kill["torn"] for kill in kills) >= 10
    # … nothing that was whole is ever lost, and old checkpoints do not pile up: two whole ones, one being written,
    # and, where a kill came before the older ones went, one more.
    assert all(kill["step"] >= kill["before"] for kill in kills) and kills[-1]["step"] > 25
    assert max(kill["checkpoints"] for kill in kills) <= 4
    # A policy that was whole is taken, with an older drafter where its own was not.
    assert any(kill["drafter_step"] < kill["step"] for kill in kills)
