"""Prompts for the tools, tokenised as TRL does it: a drafter is sensitive to the prefix."""

import json
from pathlib import Path

from datasets import load_dataset
from transformers import PreTrainedTokenizerBase


# More than a warm-up goes through; tokenising a whole data set takes longer than the warm-up.
MAX_DATASET_PROMPTS = 4096

FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """
    Token ids of the prompts of a JSONL file.

    Args:
        path (`Path`):
            File with one JSON object a line; `prompt` is a text or a list of messages.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.

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
        prompts.append(_token_ids(row["prompt"], tokenizer))
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    return prompts


def read_dataset_prompts(name: str, split: str, column: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
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
    return [_token_ids(prompt, tokenizer) for prompt in dataset[column]]


def _token_ids(prompt: str | list[dict], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return rendered["input_ids"]
