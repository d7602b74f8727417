"""
What may leave the machine: which part of the command line is written down, and a scan of files before they are pushed.

Nothing that is written on purpose needs the scan. It is for what gets into a folder by another way: a repository id or
a path with a key in it, facts that a script adds to `provenance.json`, files that other programs leave beside the run.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import get_token
from huggingface_hub.utils import filter_repo_objects


# Numbers and switches of a training run; of every other option only the name is kept. Names as argparse spells them.
HARMLESS_OPTIONS = frozenset(
    """
    beta bf16 draft_vocab_size drafter_learning_rate drafter_time_budget drafter_training drafter_vocab_size
    epochs eval_steps feature_buffer_tokens fp16 gradient_accumulation_steps
    gradient_checkpointing learning_rate logging_steps max_completion_length max_grad_norm max_num_seqs max_s
    max_steps max_tokens_per_step num_generations num_iterations num_train_epochs per_device_eval_batch_size
    per_device_train_batch_size save_steps seed speculation_activation_threshold steps_per_generation temperature
    tokens top_k top_p unroll_steps use_vllm warmup_steps weight_decay
    """.split()
)
HARMLESS_VALUE = re.compile(r"[+-]?\d[\d_.]*(e[+-]?\d+)?|true|false", re.IGNORECASE)
OPTION = re.compile(r"--([A-Za-z][\w.-]*)|-[A-Za-z]")  # `-pVALUE` is none

# Names of environment variables whose value is a secret.
SECRET_VARIABLE = re.compile(
    r"TOKENS?(_|$)|SECRET|PASSW|CREDENTIAL|APIKEY|(^|_)(AUTH|KEY|PASS|PWD)(_|$)", re.IGNORECASE
)
WORKING_FOLDERS = ("PWD", "OLDPWD")
# Keys of a JSON file. Not every `..._token`: tokenizers have `eos_token` and its like.
SECRET_KEY = re.compile(
    r"(.*[^a-z])?(passw(or)?d|secret|credentials?|bearer|(api|access|private|secret)_?key"
    r"|(hub|hf|api|auth|access|refresh|bearer)_?token)",
    re.IGNORECASE,
)
MASKED = re.compile(r"\**|<[A-Z_]+>|None|null")

# What is known by its form: tokens of the usual services, private keys, web tokens, passwords in addresses.
KNOWN_FORMS = re.compile(
    r"\b(hf_|sk-|sk_live_|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|nvapi-|AKIA|AIza)[\w-]{16,}"
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]+:[^/\s@]+@"
)
# Tried on 3,097 identifiers with digits of transformers, TRL and vLLM, of which 19 look random, and on words drawn at
# random from letters and digits, of which 93 to 98 % do (of 20 characters in lower case, 79 %).
WORD = re.compile(r"[A-Za-z0-9]{20,}")
READABLE_PART = re.compile(r"[A-Z][a-z]{2,}|[a-z]{4,}|[A-Z]{4,}")
MIN_UNREADABLE_SHARE = 0.4
MIN_GROUPS_OF_DIGITS = 4

# Commits and checksums look like keys, and stand where they are expected or in the cache of the Hub.
DIGEST = re.compile(r"\b([0-9a-f]{40}|[0-9a-f]{64})\b")
DIGEST_KEY = re.compile(r"revision|commit|hash|sha\d*|digest|checksum", re.IGNORECASE)
CACHED_REVISION = re.compile(r"snapshots/[0-9a-f]{40}\b")
# Links carry ids that look random; what is secret in a link is its password or its query.
LINK = re.compile(r"https?://[^\s?#\"'<>)\]]+")

# Vocabularies are full of odd words, and large files are logs or vocabularies.
VOCABULARIES = {
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
}
MAX_BYTES_OF_WORDS = 2**20


class SecretsFoundError(ValueError):
    """Files that were to be pushed hold what looks like a secret."""


def options_only(command: Sequence[str]) -> list[str]:
    """
    The script's name and the names of the options of a command line; values of [`HARMLESS_OPTIONS`] only, if numbers.

    No list of dangerous options is ever complete: whoever pushes a drafter publishes this line.
    """
    shown = [Path(command[0]).name] if command else []
    takes_value = False
    for word in command[1:]:
        name, equals, value = word.partition("=")
        option = OPTION.fullmatch(name)
        if option is None or looks_random(name):
            if takes_value and HARMLESS_VALUE.fullmatch(word):
                shown.append(word)
            takes_value = False
            continue
        is_harmless = (option[1] or "").replace("-", "_") in HARMLESS_OPTIONS
        shown.append(word if equals and is_harmless and HARMLESS_VALUE.fullmatch(value) else name)
        takes_value = is_harmless and not equals
    return shown


def refuse_secrets(
    folder: str | os.PathLike, ignore_patterns: Sequence[str] = (), secrets: Mapping[str, str | None] | None = None
) -> None:
    """
    Looks through the text files of a folder that is about to be pushed.

    Args:
        folder (`str` or `os.PathLike`):
            The folder.
        ignore_patterns (`Sequence[str]`, *optional*, defaults to `()`):
            Files that are not pushed, as `huggingface_hub` takes them.
        secrets (`Mapping[str, str | None]`, *optional*):
            Further secrets that are known, by a name for each.

    Raises:
        [`SecretsFoundError`]: If there are any; the message names file and key, never the value.
    """
    known = secrets_of_environment() | {name: value for name, value in (secrets or {}).items() if value}
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    found = [
        f"{name}, {place}"
        for name in filter_repo_objects(files, ignore_patterns=list(ignore_patterns))
        for place in _secrets_in(Path(folder, name), known)
    ]
    if found:
        raise SecretsFoundError(
            f"{folder} is not pushed, since it holds what looks like a secret: {'; '.join(found)}. Remove it "
            "there (and where it came from), then push again. If it is none, push the folder with `hf upload`."
        )


def secrets_of_environment() -> dict[str, str]:
    """Values of environment variables with the name of a secret, and the token of `hf auth login`, by their names."""
    secrets = {
        f"the environment variable {name}": value
        for name, value in os.environ.items()
        if SECRET_VARIABLE.search(name) and name not in WORKING_FOLDERS and _is_telling(value)
    }
    token = get_token()
    return secrets if token is None else secrets | {"the token of `hf auth login`": token}


def _is_telling(value: str) -> bool:
    """Whether a value is found by chance in no text: not a path, a short word or a short number."""
    is_plain = value.isalpha() or value.isdecimal()
    return len(value) >= (12 if is_plain else 8) and not os.path.exists(value)


def looks_random(text: str) -> bool:
    """Whether a text has a word of letters and digits that nobody would read aloud."""
    for word in WORD.findall(text):
        if word.isalpha() or word.isdecimal():
            continue
        unreadable = len(READABLE_PART.sub("", word))
        if unreadable >= MIN_UNREADABLE_SHARE * len(word) or len(re.findall(r"\d+", word)) >= MIN_GROUPS_OF_DIGITS:
            return True
    return False


def _secrets_in(path: Path, known: Mapping[str, str]) -> Iterator[str]:
    data = path.read_bytes()
    if b"\0" in data[:8192]:
        return
    text = data.decode(errors="replace")
    words = path.name not in VOCABULARIES and len(data) <= MAX_BYTES_OF_WORDS
    if not words and _reason("", text, known, words) is None:
        return
    for place, value in _json_texts(text) if path.suffix == ".json" else _lines(text):
        reason = _reason(place, value, known, words)
        if reason is not None:
            is_shown = _reason("", place, known, words) is None
            yield f"{place if is_shown else 'a place'}: {reason}"


def _json_texts(text: str) -> Iterator[tuple[str, str]]:
    """Texts of a JSON file, keys among them, and where they stand; its lines where it cannot be read."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        yield from _lines(text)
        return
    waiting: list[tuple[str, Any]] = [("", content)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, str):
            yield key or "text", value
        elif isinstance(value, dict):
            yield from ((f"{key}, a key".removeprefix(", "), name) for name in value)
            waiting += [(f"{key}.{name}" if key else name, part) for name, part in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{key}[{number}]", part) for number, part in enumerate(value)]


def _lines(text: str) -> Iterator[tuple[str, str]]:
    return ((f"line {number}", line) for number, line in enumerate(text.splitlines(), start=1))


def _reason(place: str, text: str, known: Mapping[str, str], words: bool) -> str | None:
    """Why a text is taken for a secret, or `None`."""
    for name, value in known.items():
        if value in text:
            return f"the value of {name}"
    if KNOWN_FORMS.search(text):
        return "the form of an access token, a private key or a password in an address"
    if SECRET_KEY.fullmatch(place.rpartition(".")[2]) and not MASKED.fullmatch(text):
        return "the name of a secret"
    if not words:
        return None
    text = LINK.sub("", CACHED_REVISION.sub("", text))
    if DIGEST_KEY.search(place) or DIGEST_KEY.search(text):
        text = DIGEST.sub("", text)
    return "a value that looks random" if looks_random(text) else None
