"""Tiny policies and samples, made on the spot."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tlt_trl.drafter import Drafter, FeatureBuffer, FeatureRecorder, FeatureSample


VOCAB_SIZE, HIDDEN_SIZE = 128, 64
POLICIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@pytest.fixture
def make_policy():
    """Random policy whose next-token distributions are far from uniform, so that mistakes show."""

    def make(kind="llama", tied=False, num_layers=4, seed=0, **overrides):
        torch.manual_seed(seed)
        config_class, model_class = POLICIES[kind]
        fields = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 96,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "tie_word_embeddings": tied,
            "bos_token_id": None,
            "eos_token_id": None,
            "initializer_range": 0.2,
        }
        if kind == "qwen3":
            fields["head_dim"] = 32
        policy = model_class(config_class(**fields | overrides))
        for name, parameter in policy.named_parameters():
            # Biases and norms start at 0 and 1; a test that mixed two of them up would pass.
            if name.endswith("bias") or "norm" in name:
                parameter.data += 0.2 * torch.randn_like(parameter)
        policy.model.norm.weight.data *= 4
        return policy.eval()

    return make


@pytest.fixture
def policy(make_policy):
    return make_policy()


@pytest.fixture
def make_drafter(policy):
    """Drafter of `policy` with every weight disturbed, so that no part of it is silent."""

    def make(draft_token_ids=None, seed=1, source=None):
        drafter = Drafter.from_policy(policy if source is None else source, draft_token_ids)
        generator = torch.Generator().manual_seed(seed)
        for parameter in drafter.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        return drafter

    return make


@pytest.fixture
def make_sample():
    """Random sample; the states mean nothing."""

    def make(num_tokens, prompt_length=2, step=0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return FeatureSample(
            input_ids=torch.randint(0, VOCAB_SIZE, (num_tokens,), generator=generator),
            aux_hidden_states=torch.randn(num_tokens, 3 * HIDDEN_SIZE, generator=generator),
            last_hidden_state=torch.randn(num_tokens, HIDDEN_SIZE, generator=generator),
            prompt_length=prompt_length,
            step=step,
        )

    return make


@pytest.fixture
def fill_buffer(policy):
    """Buffer with the states of `policy` on its own samples."""

    def fill(num_rows=16, prompt_length=4, answer_length=20, step=0, seed=0):
        torch.manual_seed(seed)
        prompts = torch.randint(0, VOCAB_SIZE, (num_rows, prompt_length))
        ids = policy.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=answer_length,
            do_sample=False,
            pad_token_id=0,
        )
        buffer = FeatureBuffer(max_tokens=10_000)
        recorder = FeatureRecorder(policy, [1, 2, 3], buffer)
        with torch.no_grad(), recorder.recording(ids, torch.ones_like(ids), prompt_length, step):
            policy(ids)
        recorder.remove()
        return buffer

    return fill
