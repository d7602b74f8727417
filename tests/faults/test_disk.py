"""
Kind of fault: the by-product ends the run. Disks that are full, cannot do what is asked of them, or go away.

A full disk is a limit on the size of files here: every byte beyond it is refused by the system, in the middle of a
file, as those beyond the end of a disk are.
"""

import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.conftest import ROOT, environment_of_its_own, save_tiny_policy
from tests.drafter.conftest import fill_buffer, make_drafter, make_policy, policy  # noqa: F401
from tests.online_drafter.conftest import clock, make_online  # noqa: F401
from tests.online_drafter.test_keeper import disturb, is_equal, make_keeper, save_checkpoint, weights  # noqa: F401

from tlt_trl.drafter.checkpoint import DrafterSnapshot
from tlt_trl.drafter.disk import size_bytes
from tlt_trl.drafter.training_state import (
    CheckpointWriter,
    newest_whole_checkpoint,
    newest_whole_drafter,
    what_is_missing,
)
from tlt_trl.generation.ranks import save_for_engine
from tlt_trl.telemetry.timeline import ROLLOUT, Timeline, read_timelines


@contextmanager
def room_for(num_bytes):
    """No file may become longer than this."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_policy(keeper, folder):
    """A checkpoint whose policy fits."""
    with keeper.checkpoint(str(folder)):
        folder.mkdir(exist_ok=True)
        (folder / "trainer_state.json").write_text("{}")
    keeper.join()
    return folder


def alarms_of(caplog, name="drafter_not_saved"):
    return [record.getMessage() for record in caplog.records if f"ALARM {name}" in record.getMessage()]


def size_of(drafter):
    return size_bytes(DrafterSnapshot.of(drafter).weights)


class TestFileSystemsThatCannotSync:
    """Network and FUSE file systems answer `fsync` with an error that means "not here"."""

    @pytest.fixture
    def syncing(self, monkeypatch):
        def fail(number, of_folder):
            fsync = os.fsync

            def failing(descriptor):
                if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_folder:
                    raise OSError(number, os.strerror(number))
                fsync(descriptor)

            monkeypatch.setattr(os, "fsync", failing)

        return fail

    @pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF])
    def test_of_a_folder(self, syncing, number, make_drafter, tmp_path):  # noqa: F811
        syncing(number, of_folder=True)
        drafter = make_drafter()
        drafter.save_pretrained(tmp_path)
        assert is_equal(type(drafter).from_pretrained(tmp_path), weights(drafter))

    def test_of_a_file(self, syncing, make_drafter, tmp_path):  # noqa: F811
        syncing(errno.EINVAL, of_folder=False)
        make_drafter().save_pretrained(tmp_path)
        assert (tmp_path / "provenance.json").is_file()

    def test_folders_that_cannot_be_opened(self, monkeypatch, make_drafter, tmp_path):  # noqa: F811
        open_ = os.open

        def refusing(path, *args, **kwargs):
            if os.path.isdir(path):
                raise PermissionError(errno.EACCES, "Permission denied")
            return open_(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", refusing)
        make_drafter().save_pretrained(tmp_path)
        assert (tmp_path / "provenance.json").is_file()

    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
    def test_a_disk_that_fails_is_an_error(self, syncing, number, make_drafter, tmp_path):  # noqa: F811
        syncing(number, of_folder=False)
        with pytest.raises(OSError, match=os.strerror(number)):
            make_drafter().save_pretrained(tmp_path)
        assert list(tmp_path.iterdir()) == []


class TestFullDisk:
    def test_the_run_goes_on_with_one_alarm_until_a_save_fits(self, make_keeper, tmp_path, monkeypatch, caplog):  # noqa: F811
        monkeypatch.setenv("TMPDIR", "/there")
        keeper = make_keeper()
        with room_for(20_000):
            for step in (3, 6):
                folder = save_policy(keeper, tmp_path / f"checkpoint-{step}")
                assert newest_whole_checkpoint(tmp_path) == str(folder)
                assert what_is_missing(folder / "drafter") is not None and newest_whole_drafter(folder) is None
                files = {path.name for path in folder.rglob("*") if path.is_file()}
                assert files == {"trainer_state.json", "policy_saved"}
            keeper.finish()
            assert not list((tmp_path / "drafter").iterdir())
        (alarm,) = alarms_of(caplog)
        assert (
            f"{tmp_path / 'checkpoint-3' / 'drafter'}" in alarm and "TMPDIR, for temporary files, is /there" in alarm
        )
        assert (
            f"It takes {size_of(keeper.drafter)} bytes" in alarm and "are free" in alarm and "File too large" in alarm
        )
        folder = save_policy(keeper, tmp_path / "checkpoint-9")
        assert newest_whole_drafter(folder) == str(folder / "drafter")
        with room_for(20_000):
            save_policy(keeper, tmp_path / "checkpoint-12")
        assert len(alarms_of(caplog)) == 2  # it had ended in between

    def test_a_resumed_run_takes_the_newest_drafter_that_was_saved(
        self,
        make_keeper,  # noqa: F811
        make_online,  # noqa: F811
        fill_buffer,  # noqa: F811
        tmp_path,
        caplog,
    ):
        online = make_online(fill_buffer())
        keeper = make_keeper(online.drafter, online)
        save_policy(keeper, tmp_path / "checkpoint-3")
        saved = weights(keeper.drafter)
        disturb(keeper.drafter)
        with room_for(20_000):
            torn = save_policy(keeper, tmp_path / "checkpoint-6")
        resumed = make_online()
        other = make_keeper(resumed.drafter, resumed)
        disturb(other.drafter)
        other.load_checkpoint(str(torn))
        assert is_equal(other.drafter, saved) and resumed.buffer.num_tokens == online.buffer.num_tokens
        assert f"The drafter of {torn} is not whole and is not taken" in caplog.text

    def test_where_the_drafter_fits_and_its_training_state_does_not(
        self,
        make_keeper,  # noqa: F811
        make_online,  # noqa: F811
        fill_buffer,  # noqa: F811
        tmp_path,
        caplog,
    ):
        online = make_online(fill_buffer(num_rows=64))
        keeper = make_keeper(online.drafter, online)
        with room_for(size_of(keeper.drafter) + 10_000):
            folder = save_policy(keeper, tmp_path / "checkpoint-3")
        (alarm,) = alarms_of(caplog)
        assert "File too large" in alarm and "unexpected pos" not in alarm
        assert what_is_missing(folder / "drafter") is None
        resumed = make_online()
        disturb(resumed.drafter)
        make_keeper(resumed.drafter, resumed).load_checkpoint(str(folder))
        assert is_equal(resumed.drafter, weights(online.drafter)) and resumed.buffer.num_tokens == 0

    def test_older_checkpoints_make_room(self, make_keeper, tmp_path, monkeypatch, caplog):  # noqa: F811
        keeper = make_keeper(save_total_limit=1)
        first = save_policy(keeper, tmp_path / "checkpoint-3")
        write = DrafterSnapshot.write

        def full_until_the_first_goes(snapshot, *args):
            with room_for(20_000 if first.exists() else 10_000_000):
                write(snapshot, *args)

        monkeypatch.setattr(DrafterSnapshot, "write", full_until_the_first_goes)
        second = save_policy(keeper, tmp_path / "checkpoint-6")
        assert not first.exists() and newest_whole_drafter(second) == str(second / "drafter")
        assert not alarms_of(caplog)

    def test_nobody_waits_for_a_rank_that_could_not_save(self, make_drafter, tmp_path):  # noqa: F811
        folder, reports, rotated = tmp_path / "drafter", [], []
        first, second = (CheckpointWriter(rank, [0, 1], reports.append) for rank in (0, 1))
        first.clear(folder)
        first.note_policy_saved(folder)
        with room_for(1_000):
            second.start(folder, {"buffer": torch.zeros(10_000)})
            second.join()
        first.start(
            folder, {"buffer": torch.zeros(10)}, DrafterSnapshot.of(make_drafter()), {}, lambda: rotated.append(True)
        )
        first.join()
        assert rotated and [report is None for report in reports] == [False, True]
        assert reports[0].needed_bytes == 40_000 and what_is_missing(folder) is None

    def test_no_room_for_the_folder_itself(self, make_keeper, tmp_path, monkeypatch, caplog):  # noqa: F811
        mkdir = Path.mkdir

        def full(path, *args, **kwargs):
            if path.name == "training":
                raise OSError(errno.EDQUOT, "Disk quota exceeded")
            mkdir(path, *args, **kwargs)

        monkeypatch.setattr(Path, "mkdir", full)
        folder = save_policy(make_keeper(), tmp_path / "checkpoint-3")
        assert newest_whole_checkpoint(tmp_path) == str(folder)
        (alarm,) = alarms_of(caplog)
        assert "Disk quota exceeded" in alarm

    def test_a_policy_that_does_not_fit_is_no_checkpoint_and_ends_the_run(self, make_keeper, tmp_path):  # noqa: F811
        keeper = make_keeper()
        first = save_policy(keeper, tmp_path / "checkpoint-3")
        with pytest.raises(OSError, match="File too large"), keeper.checkpoint(str(tmp_path / "checkpoint-6")):
            with room_for(1_000):
                (tmp_path / "checkpoint-6" / "trainer_state.json").write_text("{}")
                (tmp_path / "checkpoint-6" / "model.safetensors").write_bytes(bytes(2_000))
        assert newest_whole_checkpoint(tmp_path) == str(first)
        with pytest.raises(ValueError, match="not whole.*policy_saved"):
            keeper.load_checkpoint(str(tmp_path / "checkpoint-6"))

    def test_at_the_end_what_was_saved_before_stays_whole(self, make_keeper, tmp_path, caplog):  # noqa: F811
        keeper = make_keeper()
        keeper.finish()
        before = {path.name: path.read_bytes() for path in (tmp_path / "drafter").iterdir()}
        disturb(keeper.drafter)
        with room_for(20_000):
            keeper.finish()
        assert {path.name: path.read_bytes() for path in (tmp_path / "drafter").iterdir()} == before
        assert f"{tmp_path / 'drafter'}" in alarms_of(caplog)[0]

    def test_whoever_asks_for_the_drafter_gets_the_error(self, make_keeper, tmp_path):  # noqa: F811
        with room_for(20_000), pytest.raises(OSError, match="File too large"):
            make_keeper().save(str(tmp_path / "mine"))

    def test_a_best_checkpoint_with_a_torn_drafter(self, make_keeper, tmp_path, caplog):  # noqa: F811
        keeper = make_keeper()
        with room_for(20_000):
            folder = save_policy(keeper, tmp_path / "checkpoint-3")
        before = weights(keeper.drafter)
        keeper.load_best(str(folder))
        assert is_equal(keeper.drafter, before) and "stays as it is" in caplog.text

    def test_no_room_for_the_engines_copy(self, make_drafter, tmp_path):  # noqa: F811
        drafter = make_drafter()
        folder = tmp_path / "copy"
        folder.mkdir()
        with room_for(20_000), pytest.raises(OSError, match="Set TMPDIR to a folder with more room") as caught:
            save_for_engine(drafter, folder)
        message = str(caught.value)
        assert f"not saved to {tmp_path}" in message and f"takes {size_of(drafter)} bytes" in message

    def test_the_timeline_ends_and_the_run_does_not(self, tmp_path, caplog):
        timeline = Timeline(tmp_path, 0, 1, lambda: None)
        with timeline.interval(ROLLOUT):
            pass
        with room_for((tmp_path / "rank_0.jsonl").stat().st_size + 10):
            for _ in range(3):
                with timeline.interval(ROLLOUT):
                    pass
        with timeline.interval(ROLLOUT):
            pass
        assert caplog.text.count("The timeline ends here") == 1
        assert len(read_timelines(tmp_path)[0].intervals) == 1


@pytest.mark.processes
class TestEndingWhileWriting:
    """A process that ends while its slow disk is still writing."""

    SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from tests.drafter.kill_script import make_drafter, rank_state
from tlt_trl.drafter.checkpoint import DrafterSnapshot
from tlt_trl.drafter.training_state import CheckpointWriter

folder, how, fsync, calls = Path(sys.argv[1]), sys.argv[2], os.fsync, []

def slow(descriptor):  # the second file is being written when the process is told to end
    calls.append(descriptor)
    if len(calls) == 2:
        if how == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    fsync(descriptor)

os.fsync = slow
writer = CheckpointWriter(0, [0])
writer.clear(folder / "drafter")
(folder / "trainer_state.json").write_text("{}")
writer.note_policy_saved(folder / "drafter")
writer.start(folder / "drafter", rank_state(1), DrafterSnapshot.of(make_drafter()), {})
while len(calls) < 2:
    time.sleep(0.001)
if how == "terminated":
    signal.pause()
"""

    def end(self, folder, how):
        command = [sys.executable, "-c", self.SCRIPT, str(folder), how]
        return subprocess.run(command, cwd=ROOT, env=environment_of_its_own(), check=False).returncode

    def test_an_exit_waits_for_the_disk(self, tmp_path):
        folder = tmp_path / "checkpoint-1"
        assert self.end(folder, "exits") == 0
        assert newest_whole_drafter(folder) == str(folder / "drafter")

    def test_a_second_signal_that_kills_leaves_the_policy(self, tmp_path):
        folder = tmp_path / "checkpoint-1"
        assert self.end(folder, "terminated") == -signal.SIGTERM
        assert newest_whole_checkpoint(tmp_path) == str(folder)
        assert newest_whole_drafter(folder) is None


@pytest.fixture(scope="module")
def run_on_a_full_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full_disk")
    policy_dir = save_tiny_policy(folder / "policy", vocab_size=64, num_layers=2)
    script = [str(ROOT / "tests" / "faults" / "disk_script.py"), policy_dir, str(folder / "run")]
    done = subprocess.run(
        [sys.executable, *script], cwd=ROOT, env=environment_of_its_own(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return json.loads(result.removeprefix("RESULT")) | {"output_dir": str(folder / "run")}


@pytest.mark.engine
class TestRunOnAFullDisk:
    def test_all_steps_are_taken_and_one_alarm_says_why_nothing_is_saved(self, run_on_a_full_disk):
        full = run_on_a_full_disk["full"]
        assert full["steps"] == 4 and full["alarms"] == 1
        assert full["metric"] == [0.0, 0.0, 1.0, 1.0]
        assert full["left"] == []

    def test_the_policys_checkpoint_is_whole_and_the_drafters_is_not_taken_for_it(self, run_on_a_full_disk):
        full = run_on_a_full_disk["full"]
        assert full["checkpoint"] == f"{run_on_a_full_disk['output_dir']}/checkpoint-4" and full["drafter"] is None

    def test_it_is_resumed_and_the_next_save_fits(self, run_on_a_full_disk):
        resumed = run_on_a_full_disk["resumed"]
        assert resumed["first_step"] == 6 and resumed["without_drafter"] == 1
        assert resumed["drafter"] == f"{run_on_a_full_disk['output_dir']}/checkpoint-6/drafter"
        assert "model.safetensors" in resumed["left"]

    def test_a_checkpoint_on_sigterm_is_whole_despite_a_second_signal(self, run_on_a_full_disk):
        terminated = run_on_a_full_disk["terminated"]
        assert terminated["signals"] == 2 and 6 < terminated["step"] < 1000
        # transformers saves before the optimiser step that it then still takes, or after it.
        steps = (terminated["step"] - 1, terminated["step"])
        assert Path(terminated["checkpoint"]).name in [f"checkpoint-{step}" for step in steps]
        assert terminated["drafter"] == f"{terminated['checkpoint']}/drafter"
