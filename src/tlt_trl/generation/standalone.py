"""Engines outside a training run, built as TRL builds its colocated one, for warm-up, benchmarks and the doctor."""

import gc
import os
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..vllm_internals.llm import make_rollout_llm_class
from ..vllm_internals.prepare import prepare_vllm
from .speculative_generation import speculative_config


if TYPE_CHECKING:
    from vllm import LLM


# Who is who among the processes of a launcher, by torch and by vLLM.
LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE", "VLLM_DP_SIZE", "VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_DP_MASTER_IP",
    "VLLM_DP_MASTER_PORT",
)  # fmt: skip

CPU_KV_CACHE_BYTES = 2**30  # 45 000 tokens of a 135M policy


def build_llm(
    model: str,
    *,
    max_num_seqs: int,
    max_model_len: int,
    drafter: str | None = None,
    max_draft_tokens: int = 5,
    draft_sampling: str = "greedy",
    gpu_memory_utilization: float = 0.4,
    seed: int = 0,
    **engine_kwargs: Any,
) -> "LLM":
    """
    Builds a vLLM engine in this process, with TRL's keywords.

    Args:
        model (`str`):
            Folder or Hub id of the policy.
        max_num_seqs (`int`):
            Largest number of running requests.
        max_model_len (`int`):
            Largest number of tokens of prompt and completion.
        drafter (`str`, *optional*):
            Folder or Hub id of a drafter. Without it the engine is a plain one, with no speculative configuration.
        max_draft_tokens (`int`, *optional*, defaults to `5`):
            Largest number of draft tokens per step.
        draft_sampling (`str`, *optional*, defaults to `"greedy"`):
            `"greedy"` or `"probabilistic"`.
        gpu_memory_utilization (`float`, *optional*, defaults to `0.4`):
            Share of the device's memory for this engine; two engines side by side must fit.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the engine, which vLLM also sets in this process.
        **engine_kwargs:
            Further arguments of `vllm.LLM`.
    """
    # Before vLLM is imported: the engine has to live in this process to be stepped from here.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    prepare_vllm()
    from vllm import LLM
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # On CPU vLLM takes its share of all memory for the cache alone: with two engines more than there is.
        engine_kwargs.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
    # A packed weight of an earlier engine that is collected while this one compiles prints pages of harmless errors.
    gc.collect()
    speculative = {}
    if drafter is not None:
        speculative["speculative_config"] = speculative_config(
            drafter, max_draft_tokens, max_num_seqs, draft_sampling == "probabilistic"
        )
    with environment_of_one_process():
        return make_rollout_llm_class(LLM)(
            model=model,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            distributed_executor_backend="external_launcher",
            max_num_batched_tokens=4096,
            logprobs_mode="processed_logprobs",
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
            disable_log_stats=False,
            **speculative,
            **engine_kwargs,
        )


@contextmanager
def environment_of_one_process() -> Iterator[None]:
    """
    What an engine reads of a launcher's environment says, inside, that there is this process only.

    Clusters set these variables for every process of a pod, also where nothing was launched: an engine would wait for
    processes that nobody starts, or for a store that nobody hosts.
    """
    found = leave_launcher()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    try:
        yield
    finally:
        leave_launcher()
        os.environ.update(found)


def leave_launcher() -> dict[str, str]:
    """Removes what a launcher has put into the environment, and returns it."""
    return {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}


def free_port() -> int:
    """
    A port of this machine that nobody listens on.

    It is used seconds later, when the model is loaded. So it is none of those that the system hands out by itself
    (Linux: 32768 and above): another process that asked for one meanwhile would get it.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_768), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("No free port was found between 20000 and 32767.")


def completion_ids(llm: "LLM", prompts: Sequence[list[int]], **sampling: Any) -> list[list[int]]:
    """
    Samples one completion per prompt.

    Args:
        llm (`vllm.LLM`):
            The engine.
        prompts (`Sequence[list[int]]`):
            Prompt token ids.
        **sampling:
            Arguments of `vllm.SamplingParams`.

    Returns:
        `list[list[int]]`: Completion token ids, in the order of the prompts.
    """
    from vllm import SamplingParams

    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SamplingParams(**sampling), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
