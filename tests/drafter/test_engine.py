"""The saved drafter in a plain `vllm.LLM`: it loads, and every draft token is the one our own model proposes."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tlt_trl.drafter import Drafter, DrafterTrainer, DrafterTrainingArguments, FeatureBuffer, FeatureRecorder


pytestmark = pytest.mark.engine

NUM_TOKENS = 3
# Scaled rotary embeddings go through vLLM's own reading of the configuration.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


def engine_environment() -> dict[str, str]:
    """One thread, no extra processes, and the OpenMP that vLLM's CPU backend is built for."""
    iomp = Path(sysconfig.get_path("data")) / "lib" / "libiomp5.so"
    return os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": str(iomp) if iomp.is_file() else "",
    }


def run_engine(tmp_path: Path, prompts: list[list[int]]) -> list[dict]:
    output = tmp_path / "output.json"
    script = Path(__file__).with_name("engine_script.py")
    command = [sys.executable, script, tmp_path / "policy", tmp_path / "drafter", str(NUM_TOKENS), output]
    run = subprocess.run(
        command, input=json.dumps(prompts), env=engine_environment(), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(output.read_text())


@torch.no_grad()
def expected_proposals(policy, drafter: Drafter, prompt: list[int], tokens: list[int], num_calls: int) -> list:
    """What our own drafter proposes after every verification, from the states of the Hugging Face policy."""
    sequence = torch.tensor(prompt + tokens)
    states = policy(sequence[None], output_hidden_states=True).hidden_states
    layer_ids = drafter.config.eagle_aux_hidden_state_layer_ids
    aux = torch.cat([states[layer][0] for layer in layer_ids], dim=-1)
    embed_tokens = policy.get_input_embeddings().weight
    known, proposals = len(prompt) + 1, []
    while len(proposals) < num_calls and known <= len(sequence):
        draft = drafter.propose(sequence[:known], aux[: known - 1], embed_tokens, NUM_TOKENS).tolist()
        proposals.append(draft)
        accepted = 0
        for draft_token, token in zip(draft, sequence[known:].tolist(), strict=False):
            if draft_token != token:
                break
            accepted += 1
        known += accepted + 1
    return proposals


def train_on(policy, drafter: Drafter, prompts: list[list[int]]) -> None:
    """Until the drafter knows the policy's greedy answers to the prompts by heart."""
    layer_ids = drafter.config.eagle_aux_hidden_state_layer_ids
    buffer = FeatureBuffer(max_tokens=10_000)
    recorder = FeatureRecorder(policy, layer_ids, buffer)
    for prompt in prompts:
        with torch.no_grad():
            ids = policy.generate(torch.tensor([prompt]), max_new_tokens=25, do_sample=False, pad_token_id=0)
            with recorder.recording(ids, torch.ones_like(ids), len(prompt), step=0):
                policy(ids)
    args = DrafterTrainingArguments(learning_rate=3e-3, unroll_steps=3, autocast_dtype=torch.float32)
    trainer = DrafterTrainer(drafter, buffer, args)
    trainer.set_policy(policy.get_input_embeddings().weight, policy.get_output_embeddings().weight)
    for _ in range(100):
        trainer.step()


@pytest.mark.parametrize(
    ("kind", "num_layers", "draft_vocab_size", "rope"),
    [
        ("llama", 4, 96, LLAMA3_ROPE),
        pytest.param("llama", 2, None, LLAMA3_ROPE, marks=pytest.mark.slow),
        ("mistral", 4, 96, LLAMA3_ROPE),
        ("qwen2", 7, 96, YARN_ROPE),
        ("qwen3", 4, None, LLAMA3_ROPE),
        pytest.param("llama", 4, 96, YARN_ROPE, marks=pytest.mark.slow),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else None,
)
def test_engine_drafts_what_our_model_drafts(make_policy, tmp_path, kind, num_layers, draft_vocab_size, rope):
    policy = make_policy(kind, num_layers=num_layers, tied=kind == "qwen3", rope_parameters=rope)
    policy.save_pretrained(tmp_path / "policy")
    draft_token_ids = None if draft_vocab_size is None else torch.arange(128 - draft_vocab_size, 128)
    drafter = Drafter.from_policy(policy, draft_token_ids)
    prompts = [[5, 17, 99, 3], [64, 2, 120, 33, 7, 8, 91]]
    train_on(policy, drafter, prompts[:1])
    drafter.save_pretrained(tmp_path / "drafter")
    results = run_engine(tmp_path, prompts)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.no_grad():
            greedy = policy.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert result["tokens"] == greedy[0, len(prompt) :].tolist()
        drafts = [proposal[0] for proposal in result["proposals"] if proposal]
        expected = expected_proposals(policy, drafter, prompt, result["tokens"], len(drafts))
        assert drafts[: len(expected)] == expected
    # Drafts of the prompt that was trained on are accepted, so positions after an acceptance are covered too.
    assert len(results[0]["proposals"]) <= 16
