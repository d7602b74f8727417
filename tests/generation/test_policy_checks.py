"""What keeps a run from speculating is told before an engine is built."""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig

from tlt_trl import TLTGRPOConfig
from tlt_trl.generation.policy_checks import why_unsupported


pytest.importorskip("vllm")
TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
}


def policy_of(config):
    return AutoModelForCausalLM.from_config(config)


def untied_by_peft(*modules):
    policy = policy_of(LlamaConfig(**TINY, tie_word_embeddings=True))
    return get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=list(modules)))


@pytest.fixture
def why(tmp_path):
    def why(policy=None, **kwargs):
        policy = policy_of(LlamaConfig(**TINY)) if policy is None else policy
        return why_unsupported(TLTGRPOConfig(str(tmp_path), use_cpu=True, **kwargs), policy)

    return why


def test_nothing_is_said_of_a_run_that_can(why):
    assert why() is None
    assert why(policy_of(LlamaConfig(**TINY, tie_word_embeddings=True))) is None


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"min_p": 0.1}, ("`min_p=0.1`", "`top_p`")),
        ({"generation_kwargs": {"logit_bias": {3: 1.0}}}, ("`logit_bias=", "`bad_words`")),
        ({"generation_kwargs": {"min_tokens": 2}}, ("`min_tokens=2`", "leave it out")),
        ({"generation_kwargs": {"seed": 0}}, ("`seed=0`", "`speculation_selector='fixed'`")),
    ],
)
def test_arguments(why, kwargs, words):
    reason = why(**kwargs)
    assert all(word in reason for word in words), reason


def test_a_seed_with_a_fixed_draft_length_is_fine(why):
    assert why(generation_kwargs={"seed": 0}, speculation_selector="fixed") is None


def test_another_model_runner(why, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert "VLLM_USE_V2_MODEL_RUNNER" in why()


def test_another_vllm(why, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.25.0")
    assert "vLLM 0.25.0 is installed" in why()


def test_a_quantised_policy(why):
    policy = policy_of(LlamaConfig(**TINY))
    policy.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert "quantization_config" in why(policy)


def test_policies_without_a_drafter(why):
    assert "GPT2LMHeadModel" in why(policy_of(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2)))
    assert "qwen3_moe" in why(policy_of(Qwen3MoeConfig(**TINY, moe_intermediate_size=16, num_experts=2, head_dim=8)))


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens"]])
def test_a_head_that_is_not_tied_any_more(why, modules):
    reason = why(untied_by_peft(*modules))
    assert "`tie_word_embeddings`" in reason and "`modules_to_save`" in reason


def test_lora_leaves_the_head_tied(why):
    policy = policy_of(LlamaConfig(**TINY, tie_word_embeddings=True))
    assert why(get_peft_model(policy, LoraConfig(r=2, target_modules=["q_proj"]))) is None
