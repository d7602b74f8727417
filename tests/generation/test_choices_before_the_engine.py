import os

import pytest
from transformers import LlamaConfig

from tlt_trl.generation.policy_checks import check_not_quantized
from tlt_trl.vllm_internals.prepare import choose_model_runner


def test_the_runner_that_the_engine_module_drives_is_chosen(monkeypatch):
    # vLLM's own default where Triton works is the other one, which `RolloutEngine` refuses.
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    choose_model_runner()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_an_explicit_choice_is_kept(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    choose_model_runner()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_a_quantised_policy_is_refused():
    class Policy:
        config = LlamaConfig(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})

    with pytest.raises(ValueError, match="quantization_config"):
        check_not_quantized(Policy())
    Policy.config = LlamaConfig()
    check_not_quantized(Policy())
