"""Settings that nobody had tried with this package: each works as in TRL, or is refused with a way out."""

import pytest
import torch
from tests.conftest import save_tiny_policy
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward
from tests.tolerance import logprob_tolerance

from tlt_trl import TLTGRPOTrainer
from tlt_trl.vllm_internals.contract import UnsupportedEngineError


pytestmark = pytest.mark.engine
ENGINE_KWARGS = {"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 2**26}
ALWAYS_FIVE = {"speculation_selector": "fixed", "speculation_strategies": ["eagle3 x5"]}
DIFFERENCE = "sampling/sampling_logp_difference/max"


def make_trainer(folder, tied=True, rewards=text_reward, **kwargs):
    policy = save_tiny_policy(folder / "policy", num_layers=2, tied=tied)
    options = {"max_steps": 2, "per_device_eval_batch_size": 4, "drafter_training": False} | kwargs
    args = colocated_arguments(folder / "run", **options)
    return TLTGRPOTrainer(policy, rewards, args, prompts(16), eval_dataset=prompts(4))


def logged(trainer, name):
    return [log[name] for log in trainer.state.log_history if name in log]


class TestRareSettings:
    @pytest.mark.parametrize("kwargs", [{"vllm_model_impl": "transformers"}, {"in_engine_kwargs": True}])
    def test_the_transformers_backend_is_refused(self, tmp_path, kwargs):
        if kwargs.pop("in_engine_kwargs", False):
            kwargs = {"vllm_engine_kwargs": ENGINE_KWARGS | {"model_impl": "transformers"}}
        with pytest.raises(UnsupportedEngineError, match=r"`vllm_model_impl='vllm'`, or `vllm_mode='server'`"):
            make_trainer(tmp_path, **kwargs)

    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_a_head_cast_to_fp32(self, tmp_path, tied):
        # The policy computes in bfloat16 and its head in float32; the engine holds what is pushed, in float32.
        trainer = make_trainer(
            tmp_path, tied, cast_lm_head_to_fp32=True, model_init_kwargs={"dtype": "bfloat16"}, max_steps=3
        )
        trainer.train()
        assert trainer.model.get_output_embeddings().weight.dtype == torch.float32
        assert trainer.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
        # bfloat16 has 8 bits: log-probs of other weights would be off by about 1.
        assert max(logged(trainer, DIFFERENCE)) < 0.5
        trainer.vllm_generation.sync_weights()
        embedding = trainer.vllm_generation.engine.weights.policy_embedding[:64]
        assert torch.equal(embedding, trainer.model.get_input_embeddings().weight.float())

    def test_one_request_at_a_time_with_five_draft_tokens(self, tmp_path):
        trainer = make_trainer(tmp_path, vllm_engine_kwargs=ENGINE_KWARGS | {"max_num_seqs": 1}, **ALWAYS_FIVE)
        trainer.train()
        assert min(logged(trainer, "tlt/draft_tokens/proposed")) > 0
        assert max(logged(trainer, DIFFERENCE)) < logprob_tolerance()

    def test_one_generation_per_evaluation_prompt_before_the_first_step(self, tmp_path):
        trainer = make_trainer(
            tmp_path, num_generations_eval=1, eval_on_start=True, eval_strategy="steps", eval_steps=1, **ALWAYS_FIVE
        )
        trainer.train()
        differences = logged(trainer, f"eval_{DIFFERENCE}")
        assert len(differences) == 3 and max(differences) < logprob_tolerance()
        assert max(logged(trainer, DIFFERENCE)) < logprob_tolerance()

    def test_two_runs_with_the_same_seed_give_the_same_text(self, tmp_path):
        def run(folder, **kwargs):
            texts = []

            def reward(completions, **_):
                texts.extend(completions)
                return text_reward(completions)

            trainer = make_trainer(tmp_path / folder, rewards=reward, speculation_selector="fixed", **kwargs)
            trainer.train()
            assert min(logged(trainer, "tlt/draft_tokens/proposed")) > 0
            return texts, [parameter.clone() for parameter in trainer.model.parameters()]

        first, again, other = run("first"), run("again"), run("other", seed=6)
        assert first[0] == again[0]
        assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
        assert first[0] != other[0]
