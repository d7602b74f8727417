"""Prompts for the tools, made as the trainer makes them: a drafter is sensitive to the prefix."""

import argparse
import json
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import PreTrainedTokenizerBase

from ..upstream import prompt_ids


# More than a warm-up goes through; tokenising a whole data set takes longer than the warm-up.
MAX_DATASET_PROMPTS = 4096

FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class PromptFormat:
    """
    What the run adds to its prompts.

    Args:
        system_prompt (`str`, *optional*):
            Comes before the messages of every prompt; a text becomes the message of a user.
        tools (`Sequence`, *optional*, defaults to `()`):
            As for the trainer: functions, or their JSON schemas.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            As in the trainer's arguments.
    """

    system_prompt: str | None = None
    tools: Sequence[Callable[..., Any] | dict[str, Any]] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def token_ids(self, prompts: list[str] | list[list[dict]], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        """
        Args:
            prompts (`list[str]` or `list[list[dict]]`):
                Texts or lists of messages.
            tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
                Tokenizer of the policy.

        Raises:
            `ValueError`: If some are texts and some messages, or the format would be ignored.
        """
        if len({isinstance(prompt, str) for prompt in prompts}) > 1:
            raise ValueError("Some prompts are texts and some are lists of messages; the trainer takes one kind only.")
        if self.system_prompt is not None:
            prompts = [self._with_system_prompt(prompt) for prompt in prompts]
        if isinstance(prompts[0], str) and (self.tools or self.chat_template_kwargs):
            raise ValueError(
                "The prompts are texts, which the trainer passes on without a chat template: --tools and "
                "--chat_template_kwargs would be ignored. Make them lists of messages, or give a --system_prompt."
            )
        return prompt_ids(prompts, tokenizer, self.tools, self.chat_template_kwargs)

    def _with_system_prompt(self, prompt: str | list[dict]) -> list[dict]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if messages[0]["role"] == "system":
            raise ValueError("A prompt has a system message already: leave --system_prompt out.")
        return [{"role": "system", "content": self.system_prompt}, *messages]


def load_tools(text: str) -> list[Callable[..., Any] | dict[str, Any]]:
    """
    The tools of a run.

    Args:
        text (`str`):
            `FILE.json` with a list of JSON schemas, or `FILE.py:NAME`, a list in a Python file, which is run for it,
            though not as `__main__`: the training script itself will do.

    Raises:
        `ValueError`: If there is no such list.
    """
    file, _, name = text.partition(":")
    if not Path(file).is_file():
        raise ValueError(f"--tools {text}: there is no file {file}.")
    tools = runpy.run_path(file).get(name) if name else json.loads(Path(file).read_text())
    if not isinstance(tools, list) or not tools:
        raise ValueError(f"--tools {text}: that is no list of tools. Give FILE.py:NAME, or FILE.json with schemas.")
    return tools


PLAIN = PromptFormat()


def prompt_format_of(args: argparse.Namespace) -> PromptFormat:
    """The format that a command's options describe."""
    tools = [] if args.tools is None else load_tools(args.tools)
    return PromptFormat(args.system_prompt, tools, args.chat_template_kwargs)


def read_prompts(
    path: Path, tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat = PLAIN
) -> list[list[int]]:
    """
    Token ids of the prompts of a JSONL file.

    Args:
        path (`Path`):
            File with one JSON object a line; `prompt` is a text or a list of messages.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.
        prompt_format ([`PromptFormat`], *optional*):
            What the run adds to them.

    Raises:
        `ValueError`: If a line has no prompt, or the file none at all.
    """
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        row = json.loads(line)
        if "prompt" not in row:
            raise ValueError(f"{path}, line {number}: no key 'prompt', only {sorted(row)}.")
        prompts.append(row["prompt"])
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    return prompt_format.token_ids(prompts, tokenizer)


def read_dataset_prompts(
    name: str,
    split: str,
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    prompt_format: PromptFormat = PLAIN,
) -> list[list[int]]:
    """
    Token ids of the prompts of a data set.

    Args:
        name (`str`):
            Hub id, or a folder or JSON, JSONL or Parquet file of this machine.
        split (`str`):
            Split of the data set. Of a large one a random part is taken.
        column (`str`):
            Column that holds texts or lists of messages.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.
        prompt_format ([`PromptFormat`], *optional*):
            What the run adds to them.

    Raises:
        `ValueError`: If the file is of another type, there is no such column, or the data set is empty.
    """
    path = Path(name)
    if path.is_file():
        if path.suffix not in FILE_TYPES:
            raise ValueError(f"--dataset {name}: a file must end in {', '.join(FILE_TYPES)}.")
        dataset = load_dataset(FILE_TYPES[path.suffix], data_files=name, split=split)
    else:
        dataset = load_dataset(name, split=split)
    if column not in dataset.column_names:
        raise ValueError(
            f"The data set {name} has no column {column!r}, only {dataset.column_names}. Name it with --prompt_column."
        )
    if not len(dataset):
        raise ValueError(f"The data set {name} holds no prompts.")
    if len(dataset) > MAX_DATASET_PROMPTS:
        dataset = dataset.shuffle(seed=0).select(range(MAX_DATASET_PROMPTS))
    return prompt_format.token_ids(list(dataset[column]), tokenizer)
