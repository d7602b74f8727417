"""Fixtures for all tests: small policies and tokenizers made on the spot, since no test may download anything."""

import os
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]

# An engine writes into the environment where its process group meets.
RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# The engine must live in the test's process, and a test must not ask a hub for anything.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def take_own_cores() -> None:
    """Gives each of several test processes cores of its own: teams of threads that share them are 10 times slower."""
    number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    cores = sorted(os.sched_getaffinity(0))
    own = cores[number % len(cores) :: count]
    os.sched_setaffinity(0, own)
    os.environ["OMP_NUM_THREADS"] = str(len(own))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, own))


if "PYTEST_XDIST_WORKER" in os.environ:  # before anything starts a team of threads
    take_own_cores()

from tlt_trl.generation.standalone import free_port  # noqa: E402  (torch reads the number of its threads when imported)


if "PYTEST_XDIST_WORKER" in os.environ:  # TRL takes 29500 while it is free: two processes would both take it
    os.environ.setdefault("MASTER_PORT", str(free_port()))  # ranks that a test launches keep that of their launcher


def environment_of_its_own() -> dict[str, str]:
    """
    Environment for a process that a test starts: it imports `tests` and does not join the engines of other tests.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS}
    search_path = f"{ROOT}{os.pathsep}{inherited.get('PYTHONPATH', '')}"
    return inherited | {"PYTHONPATH": search_path, "MASTER_PORT": str(free_port())}


def save_tiny_policy(
    directory, vocab_size=64, num_layers=4, seed=0, tied=True, spread=0.3, model_type="llama", spread_vectors=0.0
):
    """
    Saves a random policy with a word-level tokenizer.

    `spread` is the standard deviation of the weights: large enough that the distributions are neither uniform nor
    one-hot, so that a sampling error shows. `spread_vectors` is that of what is added to norms and biases, which begin
    at one and zero.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = AutoConfig.for_model(
        model_type,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's CPU attention has a kernel for
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, spread)
                elif spread_vectors:
                    parameter.add_(torch.randn_like(parameter) * spread_vectors)
    model.save_pretrained(directory)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3} | {f"w{i}": i for i in range(4, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def tiny_policy_dir(tmp_path_factory):
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def make_tiny_policy():
    """`save_tiny_policy`, for tests that need more than one policy or one of another kind."""
    return save_tiny_policy
