"""Docstring and page of the configuration say what the help texts say, which are the one description of a field."""

import dataclasses
import importlib.util

import pytest
from transformers import HfArgumentParser
from trl import GRPOConfig

from tlt_trl import TLTGRPOConfig

from .conftest import ROOT


@pytest.fixture(scope="module")
def docs():
    spec = importlib.util.spec_from_file_location("generate_config_docs", ROOT / "scripts" / "generate_config_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def outdated(docs):
    """Names of the files that do not say what the given descriptions say."""

    def names(groups):
        changes = docs.out_of_date(groups, docs.CONFIG_FILE.read_text(), docs.PAGE.read_text())
        return sorted(path.name for path in changes)

    return names


def changed(groups, name, **changes):
    return {
        prefix: [dataclasses.replace(field, **(changes if field.name == name else {})) for field in fields]
        for prefix, fields in groups.items()
    }


def test_docstring_and_page_are_up_to_date(docs, outdated):
    assert outdated(docs.descriptions()) == [], "run `python scripts/generate_config_docs.py`"


def test_a_parser_of_the_command_line_changes_nothing(docs, outdated):
    HfArgumentParser(TLTGRPOConfig)  # writes over the types of the fields
    assert outdated(docs.descriptions()) == []


def test_every_field_of_ours_is_described(docs):
    described = [field.name for fields in docs.descriptions().values() for field in fields]
    ours = TLTGRPOConfig.__dataclass_fields__.keys() - GRPOConfig.__dataclass_fields__.keys()
    assert set(described) == ours and len(described) == len(ours)
    for name in described:
        assert f"{name} (`" in TLTGRPOConfig.__doc__


@pytest.mark.parametrize("change", [{"help": "Something else."}, {"default": 7}])
def test_a_changed_field_is_noticed(docs, outdated, change):
    groups = changed(docs.descriptions(), "drafter_time_budget", **change)
    assert outdated(groups) == ["configuration.md", "tlt_grpo_config.py"]


def test_a_field_of_no_group_is_refused(docs, monkeypatch):
    monkeypatch.setattr(docs, "GROUPS", {name: group for name, group in docs.GROUPS.items() if name != "feature_"})
    with pytest.raises(KeyError, match="feature_"):
        docs.descriptions()


def test_writing_brings_the_files_up_to_date(docs, outdated, tmp_path, monkeypatch):
    page = docs.PAGE.read_text()
    broken = page.replace("Learning rate of the drafter's own AdamW", "The drafter's learning rate")
    assert broken != page
    for name in ("CONFIG_FILE", "PAGE"):
        path = tmp_path / getattr(docs, name).name
        path.write_text(broken if name == "PAGE" else getattr(docs, name).read_text())
        monkeypatch.setattr(docs, name, path)
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["generate_config_docs.py", "--check"])
    assert docs.main() == 1 and docs.PAGE.read_text() == broken
    monkeypatch.setattr("sys.argv", ["generate_config_docs.py"])
    assert docs.main() == 0 and docs.PAGE.read_text() == page
    monkeypatch.setattr("sys.argv", ["generate_config_docs.py", "--check"])
    assert docs.main() == 0


def test_pages_without_marks_are_refused(docs):
    with pytest.raises(ValueError, match="is not there to be filled in"):
        docs.between("text", docs.PAGE_MARKS, "new")
