"""Kind of fault: half of what a run does. What the docs say of logged counts; which engine options can be reached."""

import pytest
from tests.conftest import save_tiny_policy
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward

from tlt_trl import TLTGRPOTrainer


pytestmark = pytest.mark.engine
ENGINE_KWARGS = {"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 2**26}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """Four rollouts and one log."""
    folder = tmp_path_factory.mktemp("run")
    args = colocated_arguments(
        folder / "run",
        max_steps=4,
        logging_steps=4,
        drafter_training=False,
        vllm_engine_kwargs=ENGINE_KWARGS | {"speculative_config": {"disable_eagle_block_drop": True}},
    )
    return TLTGRPOTrainer(save_tiny_policy(folder / "policy", num_layers=2), text_reward, args, prompts(16))


class TestHalfOfTheRun:
    def test_a_log_of_several_steps_is_their_mean(self, trainer, monkeypatch):
        generation, rollouts = trainer.vllm_generation, []
        pop_metrics = generation.pop_metrics

        def recorded(is_training):
            metrics, summary = pop_metrics(is_training)
            rollouts.append(metrics)
            return metrics, summary

        monkeypatch.setattr(generation, "pop_metrics", recorded)
        trainer.train()
        (log,) = [log for log in trainer.state.log_history if "loss" in log]
        assert len(rollouts) == 4
        for name in ("tlt/rollout/tokens", "tlt/rollout/time_s", "tlt/acceptance_length", "tlt/sync/time_s"):
            assert log[name] == pytest.approx(sum(metrics[name] for metrics in rollouts) / 4), name

    def test_speculative_options_of_the_user_reach_the_engine(self, trainer):
        config = trainer.vllm_generation.llm.llm_engine.vllm_config.speculative_config
        assert config.disable_eagle_block_drop
        assert config.method == "eagle3" and config.num_speculative_tokens == 5
