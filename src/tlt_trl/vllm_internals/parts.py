"""The parts of an in-process vLLM V1 engine, looked up once."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .contract import UnsupportedEngineError, require
from .shards import TensorParallelRank


if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class EngineParts:
    """
    What this package reads of an engine (vLLM 0.31, `external_launcher`, V1 model runner).

    Attributes:
        llm_engine: Takes requests and steps.
        core: Has the queue of steps that an asynchronous scheduler has run ahead.
        scheduler, worker, runner: Of the only worker in this process.
        proposer: vLLM's drafter.
    """

    llm_engine: Any
    core: Any
    scheduler: Any
    worker: Any
    runner: Any
    proposer: Any  # `None` in an engine without a speculative configuration

    @classmethod
    def of(cls, llm: "LLM") -> "EngineParts":
        """
        Raises:
            [`UnsupportedEngineError`]: If the engine runs in another process, uses a model runner that is not known
            here, or lacks an attribute that this package needs.
        """
        core = require(llm, "llm_engine.engine_core.engine_core")
        worker = require(core, "model_executor.driver_worker.worker")
        runner = require(worker, "model_runner")
        _require_known_runner(runner)
        for owner, path in (
            (core, "batch_queue"),
            (runner, "kv_cache_config.kv_cache_groups"),
            (worker, "vllm_config"),
        ):
            require(owner, path)
        speculates = require(worker, "vllm_config.speculative_config") is not None
        proposer = require(runner, "drafter") if speculates else None
        return cls(llm.llm_engine, core, require(core, "scheduler"), worker, runner, proposer)

    @property
    def config(self) -> Any:
        return self.worker.vllm_config

    @property
    def speculative_config(self) -> Any:
        """`None` in a plain engine."""
        return self.config.speculative_config

    @property
    def device(self) -> torch.device:
        return self.runner.device

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        return self.config.model_config.dtype

    @property
    def tensor_parallel_rank(self) -> TensorParallelRank:
        num_ranks = self.config.parallel_config.tensor_parallel_size
        # As TRL makes the groups: consecutive ranks. vLLM's own group is what is to be checked.
        return TensorParallelRank(self.config.parallel_config.rank % num_ranks, num_ranks)

    @property
    def max_num_seqs(self) -> int:
        return self.config.scheduler_config.max_num_seqs

    @property
    def max_model_len(self) -> int:
        return self.config.model_config.max_model_len

    @property
    def is_asynchronous(self) -> bool:
        """Whether the scheduler runs ahead of the model."""
        return self.config.scheduler_config.async_scheduling

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens of prompt and completion, over all requests, that the KV cache has room for."""
        return self.config.cache_config.num_gpu_blocks * self.config.cache_config.block_size

    @property
    def can_defer(self) -> bool:
        """Whether the drafter's keys and values can be written later than their tokens are sampled."""
        if self.speculative_config is None:
            return False
        # Groups of layers with different attention share the KV cache's memory: a block that a request has left may
        # hold the policy's keys and values by the time the drafter's are written.
        num_layers = self.speculative_config.draft_model_config.hf_config.num_hidden_layers
        has_one_group = len(self.runner.kv_cache_config.kv_cache_groups) == 1
        return self.speculative_config.method == "eagle3" and num_layers == 1 and has_one_group

    @property
    def sampler(self) -> Any:
        """The module that draws tokens from filtered logits."""
        return require(self.runner, "sampler.topk_topp_sampler")

    @property
    def verifier(self) -> Any:
        """The module that accepts or rejects draft tokens."""
        return require(self.runner, "rejection_sampler")

    def has_grammar(self) -> bool:
        """Whether a running request has structured outputs."""
        return any(request.use_structured_output for request in self.scheduler.running)

    def has_unfinished_requests(self) -> bool:
        # An asynchronous scheduler has one more step under way when the last request ends; left there, it would be
        # taken for the first one of the next rollout.
        return self.llm_engine.has_unfinished_requests() or bool(self.core.batch_queue)

    def abort_all(self) -> None:
        """Drops all unfinished requests."""
        requests = require(self.llm_engine, "output_processor.request_states")
        self.llm_engine.abort_request(list(requests), internal=True)
        while self.has_unfinished_requests():
            self.llm_engine.step()

    def shutdown(self) -> None:
        """Ends the engine."""
        require(self.llm_engine, "engine_core").shutdown()


def _require_known_runner(runner: Any) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    # The V2 runner (vllm.v1.worker.gpu.model_runner) keeps its draft tokens and its weights elsewhere.
    if not isinstance(runner, GPUModelRunner):
        raise UnsupportedEngineError(
            f"vLLM uses the model runner {type(runner).__module__}.{type(runner).__name__}, which is not supported. "
            "Set VLLM_USE_V2_MODEL_RUNNER=0 before the trainer is built."
        )
