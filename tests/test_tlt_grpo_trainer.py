import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoConfig
from trl import GRPOConfig, GRPOTrainer

from tlt_trl import Drafter, TLTGRPOConfig, TLTGRPOTrainer
from tlt_trl.inactive_drafter import InactiveOnlineDrafter

from .conftest import ROOT, environment_of_its_own, save_tiny_policy
from .tolerance import logprob_tolerance


def prompts(count=64):
    return Dataset.from_list([{"prompt": f"w{5 + i % 40} w{9 + i % 20} w7"} for i in range(count)])


def text_reward(completions, **kwargs):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def sleeping_reward(completions, **kwargs):
    time.sleep(1.0)
    return text_reward(completions)


def arguments(config_class, output_dir, **kwargs):
    return config_class(
        str(output_dir),
        **{
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": 3,
            "seed": 5,
        }
        | kwargs,
    )


def colocated_arguments(output_dir, **kwargs):
    """`arguments` of a run with an engine of its own, uncompiled and in float32."""
    engine_kwargs = {"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 2**26}
    colocated = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 64}
    return arguments(TLTGRPOConfig, output_dir, **{**colocated, "vllm_engine_kwargs": engine_kwargs} | kwargs)


class TestWithoutVLLM:
    def test_same_losses_as_trl(self, tiny_policy_dir, tmp_path):
        def losses(trainer_class, config_class):
            args = arguments(config_class, tmp_path)
            trainer = trainer_class(tiny_policy_dir, text_reward, args, prompts())
            trainer.train()
            weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
            logs = [log for log in trainer.state.log_history if "loss" in log]
            return [(log["loss"], log["grad_norm"], log["reward"]) for log in logs], weights

        theirs, their_weights = losses(GRPOTrainer, GRPOConfig)
        ours, our_weights = losses(TLTGRPOTrainer, TLTGRPOConfig)
        assert len(ours) == 3 and any(grad_norm for _, grad_norm, _ in ours)
        assert ours == theirs
        assert torch.equal(our_weights, their_weights)

    def test_says_that_it_is_inactive(self, tiny_policy_dir, tmp_path, caplog):
        trainer = TLTGRPOTrainer(tiny_policy_dir, text_reward, arguments(TLTGRPOConfig, tmp_path), prompts())
        assert "use_vllm=True" in caplog.text and "inactive" in caplog.text
        assert trainer.drafter is None and not trainer.speculative

    def test_accepts_a_plain_grpo_config(self, tiny_policy_dir, tmp_path):
        trainer = TLTGRPOTrainer(tiny_policy_dir, text_reward, arguments(GRPOConfig, tmp_path), prompts())
        assert isinstance(trainer.args, TLTGRPOConfig)

    def test_an_evaluation_is_told_to_the_drafter(self, tiny_policy_dir, tmp_path):
        args = arguments(TLTGRPOConfig, tmp_path, per_device_eval_batch_size=4)
        trainer = TLTGRPOTrainer(tiny_policy_dir, text_reward, args, prompts(), eval_dataset=prompts(4))
        inside = []

        class Listening(InactiveOnlineDrafter):
            @contextmanager
            def evaluating(self):
                inside.append(True)
                yield
                inside.append(False)

        trainer.online_drafter = Listening()
        trainer.evaluate()
        assert inside == [True, False]

    def test_trainers_of_one_process_count_for_themselves(self, tiny_policy_dir, tmp_path):
        first, second = (
            TLTGRPOTrainer(tiny_policy_dir, text_reward, arguments(TLTGRPOConfig, tmp_path), prompts())
            for _ in range(2)
        )
        first.online_drafter.load_state_dict({"tokens_trained": 5})
        assert second.online_drafter.tokens_trained == TLTGRPOTrainer.online_drafter.tokens_trained == 0

    def test_what_hooks_read_is_there_without_construction(self):
        # TRL's own tests make trainers without calling `__init__`, and are run with this class too.
        assert TLTGRPOTrainer.speculative is False and TLTGRPOTrainer.online_drafter.pop_metrics() == {}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min_p": 0.1, "speculation_on_unsupported": "error"}, "min_p"),
        (
            {"generation_kwargs": {"logit_bias": {3: 1.0}}, "speculation_on_unsupported": "error"},
            "cannot speculate.*logit_bias",
        ),
        ({"drafter_vocab_size": 1000}, "drafter_vocab_size"),
    ],
)
def test_bad_input_is_refused_before_the_engine_is_built(tiny_policy_dir, tmp_path, kwargs, message):
    args = arguments(TLTGRPOConfig, tmp_path, use_vllm=True, vllm_mode="colocate", **kwargs)
    with pytest.raises(ValueError, match=message):
        TLTGRPOTrainer(tiny_policy_dir, text_reward, args, prompts())


# The engine stays in its process until the end, so each run gets one of its own.
ENGINE_RUN = """
import json, sys
from tests.test_tlt_grpo_trainer import engine_run
if __name__ == "__main__":
    print("RESULT", json.dumps(engine_run(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))))
"""


class RecordingHub:
    """What `transformers` asks of the Hub while it trains; remembers which files of the drafter were there to push."""

    def __init__(self):
        self.pushed = []

    def create_repo(self, name, **kwargs):
        return SimpleNamespace(repo_id=f"somebody/{name}")

    def upload_folder(self, folder_path, path_in_repo="", ignore_patterns=(), **kwargs):
        drafter = Path(folder_path) / "drafter"
        files = filter_repo_objects(
            sorted(str(path.relative_to(folder_path)) for path in drafter.rglob("*.*")),
            ignore_patterns=ignore_patterns,
        )
        self.pushed.append([path_in_repo, [file.removeprefix("drafter/") for file in files]])
        done = Future()
        done.set_result(None)
        return done


def engine_run(policy_dir, output_dir, peft=False, resume=False, slow_reward=False, **kwargs):
    """Trains with the real engine and reports what the tests look at."""
    from peft import LoraConfig
    from transformers import trainer as transformers_trainer

    hub = RecordingHub()
    transformers_trainer.hf_api = lambda: hub

    if kwargs.get("drafter_training", True):
        kwargs = {"drafter_time_budget": 0.5} | kwargs
    if "speculation_strategies" not in kwargs:
        # What training may cost then does not depend on whether such a small policy's rollouts become faster.
        kwargs = {"speculation_selector": "fixed"} | kwargs
    args = colocated_arguments(output_dir, gradient_accumulation_steps=2, **{"max_steps": 4} | kwargs)
    peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if peft else None
    trainer = TLTGRPOTrainer(
        policy_dir,
        sleeping_reward if slow_reward else text_reward,
        args,
        prompts(),
        eval_dataset=prompts(4),
        peft_config=peft_config,
    )
    trainer.train(resume_from_checkpoint=resume)
    left_by_train = sorted(os.listdir(os.path.join(output_dir, "drafter")))
    trainer.vllm_generation.sync_weights()
    engine = trainer.vllm_generation.engine
    logs = [log for log in trainer.state.log_history if "loss" in log]
    base = trainer.model.get_base_model() if peft else trainer.model
    online, training = trainer.online_drafter, trainer.args.drafter_training

    def recorded():
        return online.buffer.num_added if training else 0

    before = recorded()
    trainer.evaluate()
    trainer.save_model(os.path.join(output_dir, "final"))
    return {
        "logs": logs,
        "embedding_equal": torch.equal(
            engine.weights.policy_embedding[: base.config.vocab_size], base.get_input_embeddings().weight
        ),
        "embedding_shared": engine.weights.drafter_embedding.data_ptr() == engine.weights.policy_embedding.data_ptr(),
        "drafter_steps": online.steps,
        "drafter_sum": sum(parameter.double().sum().item() for parameter in trainer.drafter.parameters()),
        "draft_token_ids": trainer.drafter.draft_token_ids.tolist(),
        "head_follows": torch.equal(
            trainer.drafter.lm_head.weight,
            trainer.vllm_generation.policy_lm_head[trainer.drafter.draft_token_ids].float(),
        ),
        "recorded_in_eval": recorded() - before,
        "left_by_train": left_by_train,
        "best_checkpoint": trainer.state.best_model_checkpoint,
        "pushed": hub.pushed,
        "saved": sorted(os.listdir(os.path.join(output_dir, "final", "drafter"))),
    }


def run_in_process(policy_dir, output_dir, **kwargs):
    done = subprocess.run(
        [sys.executable, "-c", ENGINE_RUN, policy_dir, str(output_dir), json.dumps(kwargs)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment_of_its_own(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[len("RESULT") :])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    policy = save_tiny_policy(tmp_path_factory.mktemp("policy"), vocab_size=64, num_layers=2)
    return run_in_process(policy, tmp_path_factory.mktemp("run"), drafter_vocab_size=32)


@pytest.mark.engine
class TestWithTheRealEngine:
    def test_logs_every_metric(self, run):
        names = set().union(*run["logs"])
        for name in (
            "tlt/acceptance_length",
            "tlt/draft_tokens/proposed",
            "tlt/draft_tokens/accepted",
            "tlt/rollout/tokens_per_s",
            "tlt/speculation_share",
            "tlt/drafter/loss",
            "tlt/drafter/acceptance_length",
            "tlt/drafter/time_s",
            "tlt/sync/time_s",
            "tlt/buffer/tokens",
            "tlt/alarm/acceptance_collapse",
        ):
            assert name in names, name

    def test_the_drafters_head_follows_the_policys(self, run):
        assert run["head_follows"]

    def test_drafter_is_trained_on_recorded_features(self, run):
        assert run["drafter_steps"] > 0
        assert run["logs"][-1]["tlt/buffer/tokens"] > 0

    def test_sampling_logprobs_equal_the_policys(self, run):
        # float32 on both sides: an engine that held other weights, or shifted log-probs, would be off by far more.
        assert max(log["sampling/sampling_logp_difference/max"] for log in run["logs"]) < logprob_tolerance()

    def test_embedding_is_the_policys_and_shared(self, run):
        assert run["embedding_equal"] and run["embedding_shared"]

    def test_evaluation_records_no_features(self, run):
        assert run["recorded_in_eval"] == 0

    def test_saves_the_drafter(self, run):
        assert {"config.json", "model.safetensors"} <= set(run["saved"])
        assert {"config.json", "model.safetensors"} <= set(run["left_by_train"])

    def test_untied_policy_with_lora(self, tmp_path):
        policy = save_tiny_policy(tmp_path / "policy", vocab_size=64, num_layers=2, tied=False)
        run = run_in_process(policy, tmp_path / "run", peft=True, beta=0.05)
        assert run["drafter_steps"] > 0 and run["embedding_equal"]
        assert max(log["sampling/sampling_logp_difference/max"] for log in run["logs"]) < logprob_tolerance()

    def test_without_importance_sampling_features_come_from_the_loss(self, tmp_path):
        policy = save_tiny_policy(tmp_path / "policy", vocab_size=64, num_layers=2)
        run = run_in_process(policy, tmp_path / "run", vllm_importance_sampling_correction=False)
        assert run["drafter_steps"] > 0

    def test_resume_goes_on_with_the_drafter_of_the_checkpoint(self, tmp_path):
        policy = save_tiny_policy(tmp_path / "policy", vocab_size=64, num_layers=2)
        saving = {"save_strategy": "steps", "save_steps": 4}
        first = run_in_process(policy, tmp_path / "run", drafter_vocab_size=32, **saving)
        # transformers takes a step even where none is left; without a budget it leaves the drafter as it was saved.
        again = run_in_process(
            policy, tmp_path / "run", drafter_vocab_size=32, resume=True, drafter_time_budget=0.0, **saving
        )
        assert first["drafter_steps"] > 0
        for name in ("drafter_steps", "drafter_sum", "draft_token_ids"):
            assert again[name] == first[name], name
        # Without drafter training the weights come back all the same; other draft lengths begin a new selector.
        frozen = run_in_process(policy, tmp_path / "run", drafter_vocab_size=32, resume=True, drafter_training=False)
        assert frozen["drafter_sum"] == first["drafter_sum"]
        other = {
            "drafter_vocab_size": 32,
            "resume": True,
            "speculation_strategies": ["eagle3 x1", "eagle3 x4"],
            "drafter_time_budget": 0.0,
        }
        assert run_in_process(policy, tmp_path / "run", **other)["drafter_sum"] == first["drafter_sum"]
        longer = run_in_process(policy, tmp_path / "run", drafter_vocab_size=32, resume=True, max_steps=8, **saving)
        assert longer["drafter_steps"] > first["drafter_steps"]

    def test_best_checkpoint_has_its_drafter_and_whole_checkpoints_are_pushed(self, tmp_path):
        policy = save_tiny_policy(tmp_path / "policy", vocab_size=64, num_layers=2)
        run = run_in_process(
            policy,
            tmp_path / "run",
            save_strategy="steps",
            save_steps=2,
            save_total_limit=1,
            eval_strategy="steps",
            eval_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="num_tokens",  # grows: the first checkpoint is the best
            greater_is_better=False,
            push_to_hub=True,
            hub_strategy="checkpoint",
            hub_always_push=True,
        )
        best = tmp_path / "run" / "checkpoint-2"
        assert run["best_checkpoint"] == str(best)
        drafter = Drafter.from_pretrained(best / "drafter", AutoConfig.from_pretrained(policy))
        assert run["drafter_sum"] == sum(parameter.double().sum().item() for parameter in drafter.parameters())
        # The drafter learnt more before the end; what `train` leaves behind are weights and facts of the best one.
        for name in ("model.safetensors", "provenance.json"):
            left, kept = (folder / "drafter" / name for folder in (tmp_path / "run", best))
            assert left.read_bytes() == kept.read_bytes(), name
        assert run["drafter_steps"] > json.loads((best / "drafter" / "provenance.json").read_text())["drafter_steps"]
        checkpoints = [files for path, files in run["pushed"] if path == "last-checkpoint"]
        assert len(checkpoints) == 2
        for files in checkpoints:
            assert {"model.safetensors", "config.json", "training/complete.json", "training/rank_0.pt"} <= set(files)
            assert "training/buffer_0.pt" not in files  # prompts and answers stay here
        assert (best / "drafter" / "training" / "buffer_0.pt").exists()

    def test_trains_beside_the_reward_function_when_told_to(self, tmp_path):
        policy = save_tiny_policy(tmp_path / "policy", vocab_size=64, num_layers=2)
        run = run_in_process(
            policy,
            tmp_path / "run",
            slow_reward=True,
            drafter_time_budget=0.0,
            drafter_background_training=True,
            log_timeline=True,
        )
        assert run["drafter_steps"] > 0
        later = run["logs"][1:]
        assert all(log["tlt/idle_s"] >= 0.9 and log["tlt/drafter/failures"] == 0.0 for log in later)
        # A sleeping reward function leaves the core to the drafter.
        assert all(log["tlt/idle_used_fraction"] > 0.5 and log["tlt/stop_latency_s"] < 0.2 for log in later)
