"""Accelerate loads every file, and what TRL has a file for says the same here."""

from pathlib import Path

import pytest
import trl
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser


FOLDER = Path(__file__).parents[1] / "accelerate_configs"
TRL_FOLDER = Path(trl.__file__).parent / "accelerate_configs"
TRL_NAMES = {
    "single_gpu": "single_gpu",
    "multi_gpu": "multi_gpu",
    "fsdp2": "fsdp2",
    "deepspeed_zero2": "zero2",
    "deepspeed_zero3": "zero3",
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_loads_it(path):
    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    args = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    assert args.config_file == str(path)


def test_none_is_missing():
    names = {path.stem for path in FOLDER.glob("*.yaml")}
    assert names == {*TRL_NAMES, "cpu_2_processes", "multi_node"}


@pytest.mark.parametrize(("name", "trl_name"), TRL_NAMES.items())
def test_says_what_trl_says(name, trl_name):
    ours = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    theirs = yaml.safe_load((TRL_FOLDER / f"{trl_name}.yaml").read_text())
    if name == "single_gpu":
        assert ours.pop("num_processes") == 1  # TRL's file has 8, which accelerate ignores there
    assert ours == {key: theirs[key] for key in ours}
    assert {key for key in theirs if key.endswith("_config")} <= set(ours)
