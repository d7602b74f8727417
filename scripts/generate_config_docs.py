"""
Writes what the help texts of `TLTGRPOConfig` say into its docstring and into docs/configuration.md.

    python scripts/generate_config_docs.py          # after a help text, a default or a field has changed
    python scripts/generate_config_docs.py --check  # exit status 1 where one of the two is out of date

The help texts are the one place where a field is described.
"""

import argparse
import dataclasses
import sys
import textwrap
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from trl import GRPOConfig

from tlt_trl import TLTGRPOConfig


ROOT = Path(__file__).resolve().parents[1]
CONFIG_FILE = ROOT / "src" / "tlt_trl" / "tlt_grpo_config.py"
PAGE = ROOT / "docs" / "configuration.md"

# Where the generated text begins and ends, in the source and in the page.
DOCSTRING_MARKS = ("    Parameters:\n", '    """\n')
PAGE_MARKS = ("<!-- fields: written by scripts/generate_config_docs.py -->\n", "<!-- end of fields -->\n")

# One prefix per concern, in the order of the fields: what follows "Parameters that control", the page's heading, and
# where to read more.
GROUPS = {
    "speculation_": ("speculative rollouts", "Speculative rollouts", ("adaptive_engine.md", "lossless.md")),
    "vllm_": ("the engine", "Engine", ("architecture.md",)),
    "sample_": ("sample reallocation", "Sample reallocation", ("reallocation.md",)),
    "drafter_": ("the drafter", "Drafter", ("drafter.md", "idle_training.md")),
    "feature_": ("the feature buffer", "Feature buffer", ("drafter.md",)),
    "log_": ("logging", "Logging", ("idle_training.md",)),
}
LINE_LENGTH = 119


@dataclasses.dataclass(frozen=True)
class Description:
    name: str
    type: str
    default: Any
    help: str


def describe(name: str, annotation: Any, default: Any, text: str) -> Description:
    # `| None` is what "optional" says, `| str` lets a command line give JSON.
    kind = get_args(annotation)[0] if isinstance(annotation, UnionType) else annotation
    written = str(kind).replace("typing.", "") if get_args(kind) else kind.__name__
    return Description(name, written, default, text)


def descriptions() -> dict[str, list[Description]]:
    """What `TLTGRPOConfig` adds, by the prefix of the fields' names, in the order of the class."""
    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    # Not `field.type`, which `HfArgumentParser` writes over.
    types = get_type_hints(TLTGRPOConfig)
    groups = {prefix: [] for prefix in GROUPS}
    for field in dataclasses.fields(TLTGRPOConfig):
        if field.name not in theirs:
            prefix = field.name.split("_")[0] + "_"
            groups[prefix].append(describe(field.name, types[field.name], field.default, field.metadata["help"]))
    return groups


def shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def docstring_section(groups: dict[str, list[Description]]) -> str:
    """The parameters in the docstring's form."""
    lines = []
    for prefix, fields in groups.items():
        lines += [f"        > Parameters that control {GROUPS[prefix][0]}", ""]
        for field in fields:
            default = "" if field.default is None else f", defaults to `{shown(field.default)}`"
            lines.append(f"        {field.name} (`{field.type}`, *optional*{default}):")
            indent = " " * 12
            lines += textwrap.wrap(
                field.help, LINE_LENGTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def page_section(groups: dict[str, list[Description]]) -> str:
    """The fields as one table per group."""
    lines = []
    for prefix, fields in groups.items():
        _, heading, pages = GROUPS[prefix]
        links = " and ".join(f"[{page}]({page})" for page in pages)
        lines += ["", f"## {heading}", "", f"See {links}.", "", "| field | default | |", "|---|---|---|"]
        lines += [f"| `{field.name}` | `{shown(field.default)}` | {field.help} |" for field in fields]
    return "\n".join(lines) + "\n\n"


def between(text: str, marks: tuple[str, str], new: str) -> str:
    """`text` with `new` between the first mark and the next occurrence of the second."""
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{marks[0].strip()!r} ... {marks[1].strip()!r} is not there to be filled in.")
    return before + begin + new + end + after


def out_of_date(groups: dict[str, list[Description]], config_source: str, page: str) -> dict[Path, str]:
    """What the files should hold, of those that hold something else."""
    wanted = {
        CONFIG_FILE: (config_source, between(config_source, DOCSTRING_MARKS, docstring_section(groups))),
        PAGE: (page, between(page, PAGE_MARKS, page_section(groups))),
    }
    return {path: new for path, (old, new) in wanted.items() if new != old}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if something would change")
    args = parser.parse_args()
    changes = out_of_date(descriptions(), CONFIG_FILE.read_text(), PAGE.read_text())
    for path, text in changes.items():
        print(f"{path.relative_to(ROOT)} {'is out of date' if args.check else 'is written anew'}")
        if not args.check:
            path.write_text(text)
    return int(args.check and bool(changes))


if __name__ == "__main__":
    sys.exit(main())
