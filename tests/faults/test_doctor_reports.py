"""
Kind of fault: the wrong one is blamed. Here: `tlt-trl doctor` answers with a traceback where a line is due.
"""

import json
import os
import sys

import pytest
from transformers import AutoConfig

from tlt_trl.tools import doctor
from tlt_trl.tools.cli import main
from tlt_trl.tools.findings import as_table


pytest.importorskip("vllm")


@pytest.fixture
def diagnosed(capfd):
    """Exit code and report of `tlt-trl doctor --json`, of which every byte on stdout is JSON."""

    def run(*words):
        code = main(["doctor", "--json", *map(str, words)])
        report = json.loads(capfd.readouterr().out)
        return code, [finding for finding in report["findings"] if finding["ok"] is False]

    return run


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestDoctorHasALineForWhateverItMeets:
    def test_a_policy_without_a_drafter(self, make_tiny_policy, tmp_path, diagnosed):
        policy = make_tiny_policy(tmp_path)
        edit(tmp_path / "config.json", architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe")
        code, (failed,) = diagnosed("--model", policy)
        assert code == 1 and failed["section"] == "model"
        assert "No drafter was tried for policies of model_type='qwen3_moe'; those of llama" in failed["value"]

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("empty", "empty holds no config.json: it is none that `save_pretrained` has written"),
            ("nowhere", "nowhere is no folder, and no id of the Hub either"),
            ("file", "file is no folder, and no id of the Hub either"),
        ],
    )
    def test_a_folder_that_is_none(self, tmp_path, diagnosed, tiny_policy_dir, name, problem):
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_text("{}")
        code, (failed,) = diagnosed("--model", tmp_path / name)
        assert code == 1 and failed["section"] == "model" and problem in failed["value"]
        code, (failed,) = diagnosed("--model", tiny_policy_dir, "--drafter", tmp_path / name)
        assert code == 1 and failed["section"] == "drafter" and problem in failed["value"]

    def test_an_id_that_the_hub_does_not_know(self, diagnosed):
        code, (failed,) = diagnosed("--model", "nobody/nothing")
        assert code == 1 and failed["section"] == "model" and "nobody/nothing" in failed["value"]

    def test_a_type_that_transformers_does_not_know(self, make_tiny_policy, tmp_path, diagnosed):
        make_tiny_policy(tmp_path)
        edit(tmp_path / "config.json", model_type="llama_of_tomorrow")
        code, (failed,) = diagnosed("--model", tmp_path)
        assert code == 1 and failed["section"] == "model" and "llama_of_tomorrow" in failed["value"]

    def test_weights_cut_off(self, make_tiny_policy, tmp_path, diagnosed):
        make_tiny_policy(tmp_path)
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        code, (failed,) = diagnosed("--model", tmp_path)
        assert code == 1 and failed["section"] == "drafter" and failed["value"]

    def test_a_policy_as_a_drafter(self, tiny_policy_dir, diagnosed):
        code, (failed,) = diagnosed("--model", tiny_policy_dir, "--drafter", tiny_policy_dir)
        assert code == 1 and failed["section"] == "drafter" and "a drafter has 1 layer" in failed["value"]

    def test_an_engine_that_does_not_start(self, tiny_policy_dir, diagnosed):
        code, (failed,) = diagnosed("--model", tiny_policy_dir, "--dtype", "float17")
        assert code == 1 and failed["section"] == "engine" and "float17" in failed["value"]
        assert "\n" not in failed["value"]

    def test_no_room_for_temporary_files(self, tiny_policy_dir, diagnosed, monkeypatch):
        def no_room(**kwargs):
            raise FileNotFoundError("No usable temporary directory found in ['/tmp']")

        monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", no_room)
        code, (failed,) = diagnosed("--model", tiny_policy_dir)
        assert code == 1 and "No usable temporary directory" in failed["value"]

    def test_an_installation_that_cannot_be_imported(self, tiny_policy_dir, diagnosed, monkeypatch):
        monkeypatch.setitem(sys.modules, "tlt_trl.tools.doctor_checks", None)
        monkeypatch.delattr("tlt_trl.tools.doctor_checks")
        code, failed = diagnosed("--model", tiny_policy_dir)
        assert code == 1 and {finding["section"] for finding in failed} == {"device", "sampling parameters"}
        assert all("Error" in finding["name"] for finding in failed)

    def test_a_package_that_is_missing(self, tiny_policy_dir, diagnosed, monkeypatch):
        installed = [found for found in doctor.metadata.distributions() if found.name != "trl"]
        monkeypatch.setattr(doctor.metadata, "distributions", lambda: installed)
        code, (failed,) = diagnosed("--model", tiny_policy_dir)
        assert code == 1 and failed["name"] == "trl" and "not installed: `pip install 'trl" in failed["value"]

    def test_what_libraries_print_is_not_on_stdout(self, tmp_path, diagnosed, monkeypatch):
        def talk():
            print("from Python")
            os.write(1, b"from C\n")
            raise SystemExit("and good-bye")

        monkeypatch.setattr(doctor, "check_versions", talk)
        code, failed = diagnosed("--model", tmp_path)
        assert code == 1 and failed[0]["name"] == "SystemExit" and failed[0]["value"] == "and good-bye"

    def test_the_table_has_the_line_too(self, tmp_path, capfd):
        assert main(["doctor", "--model", str(tmp_path)]) == 1
        out = capfd.readouterr().out
        assert "  FAIL  policy" in out and out.endswith("1 problems: policy\n")

    @pytest.mark.engine
    def test_a_short_context(self, make_tiny_policy, tmp_path, diagnosed):
        make_tiny_policy(tmp_path)
        edit(tmp_path / "config.json", max_position_embeddings=32)
        assert AutoConfig.from_pretrained(tmp_path).max_position_embeddings == 32
        code, failed = diagnosed("--model", tmp_path, "--dtype", "float32")
        assert (code, failed) == (0, [])


def test_a_report_of_nothing_but_an_error_can_be_shown(monkeypatch):
    def broken():
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "_diagnose", lambda *args: broken())
    assert as_table(doctor.diagnose("policy")).splitlines() == [
        "doctor",
        "  FAIL  RuntimeError  two lines",
        "",
        "1 problems: RuntimeError",
    ]
