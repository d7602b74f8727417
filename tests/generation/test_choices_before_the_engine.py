import os

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
