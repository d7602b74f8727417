"""TRL's vLLM generation with speculative decoding, a step loop of our own, and a drafter that is kept in sync."""

import functools
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from ..strategy import Strategy
from ..telemetry.alarms import Alarms
from ..telemetry.timeline import WEIGHT_SYNC, Timeline
from ..upstream import replaced_llm
from ..vllm_internals.llm import make_rollout_llm_class
from ..vllm_internals.prepare import prepare_vllm
from ..vllm_internals.weights import WeightMismatchError
from .canary import InexactEngineError, failure_message, run_canary
from .cuda_graphs import plan_cuda_graphs
from .engine import RolloutEngine
from .policy_checks import check_policy
from .policy_mark import PolicyMark
from .rollout_loop import RolloutLoop


if TYPE_CHECKING:
    from ..drafter import Drafter
    from ..tlt_grpo_config import TLTGRPOConfig


logger = logging.getLogger(__name__)


class SpeculativeVLLMGeneration(VLLMGeneration):
    """
    Colocated vLLM generation with speculative decoding; in server mode it is TRL's class unchanged.

    Only three things differ from [`~trl.generation.vllm_generation.VLLMGeneration`]: the engine is built with a
    `speculative_config`, the engine is stepped by a [`RolloutLoop`], and `sync_weights` pushes
    policy and drafter together and reads them back. TRL's `generate` is used as it is, so that tensor parallelism,
    images, structured outputs and sleep mode keep their one implementation.

    Args:
        args ([`TLTGRPOConfig`]):
            Configuration of the trainer.
        build_drafter (`Callable[[PreTrainedModel, Callable], Drafter]`):
            Makes the drafter for the policy. Called once, before the engine is built. The second argument gives a
            context in which the parameters in a list are whole.
        make_selector (`Callable[[int, bool], Selector]`):
            Makes the strategy selector for a largest batch size; the second argument says whether the engine can
            look draft tokens up.
        **kwargs:
            Arguments of [`~trl.generation.vllm_generation.VLLMGeneration`].
    """

    def __init__(
        self,
        *,
        args: "TLTGRPOConfig",
        build_drafter: "Callable[[PreTrainedModel, Callable], Drafter]",
        make_selector: Callable[[int, bool], object],
        **kwargs,
    ):
        self.args = args
        self._build_drafter = build_drafter
        self._make_selector = make_selector
        self.drafter: Drafter | None = None
        self.engine: RolloutEngine | None = None
        self.rollout_loop: RolloutLoop | None = None
        # Copies of the policy's embedding and head, taken at every sync: what the drafter trains against.
        self.policy_embedding: torch.Tensor | None = None
        self.policy_lm_head: torch.Tensor | None = None
        self.sync_seconds = 0.0
        self._synced_mark: PolicyMark | None = None
        self.alarms = Alarms()
        self.timeline: Timeline | None = None
        # Counts trainings of the drafter; the second is the version that the engine holds.
        self.drafter_version = 0
        self.pushed_drafter_version = 0
        self._lag_step: int | None = None
        self._drafter_lag = 0
        super().__init__(**kwargs)

    def _init_vllm(self):
        if self.mode != "colocate":
            return super()._init_vllm()

        prepare_vllm()
        check_policy(self.model, self.trust_remote_code)
        self.drafter = self._build_drafter(self.model, self._dist.gather_params)
        with tempfile.TemporaryDirectory(prefix="tlt-trl-drafter-") as drafter_dir:
            self.drafter.save_pretrained(drafter_dir)
            with replaced_llm(functools.partial(self._build_llm, drafter_dir)):
                super()._init_vllm()
        self.engine = RolloutEngine(self.llm)
        self.rollout_loop = RolloutLoop(
            self.engine, self._make_selector(self.engine.max_num_seqs, self.engine.can_look_up)
        )
        self.llm.rollout_loop = self.rollout_loop
        if self.tensor_parallel_size > 1:
            self.rollout_loop.agree = self._strategy_of_leader
        self._check_exactness()

    def _strategy_of_leader(self, strategy: Strategy) -> Strategy:
        """
        The choice of the first rank of the tensor-parallel group, whose timings alone decide: each rank measures its
        own, and ranks that chose differently would wait for each other for ever.
        """
        strategies = self.rollout_loop.selector.strategies
        index = torch.tensor([strategies.index(strategy)], device=self.accelerator.device)
        torch.distributed.broadcast(index, group=self.tp_group, group_src=0)
        return strategies[int(index.item())]

    def _build_llm(self, drafter_dir: str, llm_class, **trl_kwargs):
        """TRL's engine with a drafter; `vllm_engine_kwargs` have the last word."""
        kwargs = trl_kwargs | (self.args.vllm_engine_kwargs or {})
        if self.accelerator.device.type == "cuda":
            self._plan_cuda_graphs(kwargs)
        longest = self.args.max_draft_tokens
        if kwargs["max_model_len"] is not None and longest >= kwargs["max_model_len"]:
            raise ValueError(
                f"{longest} draft tokens do not fit into a context of {kwargs['max_model_len']} tokens. Raise "
                "`vllm_max_model_length`, or name shorter `speculation_strategies`."
            )
        is_probabilistic = any(strategy.draft_sampling == "probabilistic" for strategy in self.args.strategies)
        draft_sampling = "probabilistic" if is_probabilistic else "greedy"
        return make_rollout_llm_class(llm_class)(
            speculative_config=speculative_config(drafter_dir, longest, kwargs["max_num_seqs"], draft_sampling),
            # Without statistics the scheduler counts no drafts.
            disable_log_stats=False,
            **kwargs,
        )

    def _plan_cuda_graphs(self, kwargs: dict) -> None:
        """Adds the sizes to capture, unless the user has said which or wants none."""
        if kwargs.get("enforce_eager") or {"compilation_config", "cudagraph_capture_sizes"} & kwargs.keys():
            return
        plan = plan_cuda_graphs(
            [strategy.num_draft_tokens for strategy in self.args.strategies], kwargs["max_num_seqs"]
        )
        kwargs["compilation_config"] = {"cudagraph_capture_sizes": list(plan.sizes)}
        config = self.model.config.get_text_config()
        logger.info(plan.describe(config.num_hidden_layers, config.hidden_size, bytes_per_value=2))

    def _check_exactness(self) -> None:
        """Asks the engine, before anything is trained on its samples, whether it is exact under speculation."""
        # An engine that sleeps at level 2 has no weights yet.
        results = run_canary(self.engine, has_weights=not self.enable_sleep_mode)
        if all(result.ok for result in results):
            return
        if self.args.speculation_on_inexact == "error":
            raise InexactEngineError(failure_message(results))
        logger.warning("%s\nGoing on without speculation.", failure_message(results))
        self.rollout_loop.disabled.add("inexact")

    def sync_weights(self):
        """
        Pushes the policy and the drafter to the engine and reads them back.

        On sharded back ends this is a collective: every rank must call it.
        """
        if self.mode != "colocate":
            return super().sync_weights()
        with self.timeline.interval(WEIGHT_SYNC) if self.timeline is not None else nullcontext():
            self._sync_colocated_weights()

    def _sync_colocated_weights(self) -> None:
        started = time.perf_counter()
        if self.enable_sleep_mode:
            # See https://github.com/huggingface/trl/issues/5142: weights must be mapped before they are written.
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        self.engine.push_policy(self._policy_weights(), verify=self.args.vllm_verify_weight_sync)
        # Sleep level 2 discards the drafter's weights too, and silently: text stays right, acceptance falls to 1.0.
        self._push_drafter()
        self.engine.reset_prefix_cache()
        # Not before: TRL merges adapters into the weights for the push and takes them out again.
        self._synced_mark = PolicyMark.of(self.model.parameters())
        self.sync_seconds += time.perf_counter() - started

    def holds_policy(self) -> bool:
        """
        Whether the engine's policy is the one that was trained last, whatever has changed it: an optimiser step, a
        checkpoint, a callback, `load_state_dict`.

        Every rank must call it, for all of them sync or none.
        """
        changed = torch.tensor(
            [float(PolicyMark.of(self.model.parameters()) != self._synced_mark)], device=self.accelerator.device
        )
        return not self.accelerator.reduce(changed, reduction="sum").item()

    def _push_drafter(self) -> None:
        try:
            self.engine.push_drafter(self.drafter.vllm_weights(), verify=self.args.vllm_verify_weight_sync)
        except WeightMismatchError as error:
            # A wrong drafter costs speed, not correctness: the run goes on without it.
            self.alarms.set("drafter_mismatch", True, str(error))
            self.rollout_loop.disabled.add("drafter_mismatch")
            return
        self.alarms.set("drafter_mismatch", False)
        self.rollout_loop.disabled.discard("drafter_mismatch")
        self.pushed_drafter_version = self.drafter_version

    def _policy_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's weights as TRL gathers them, keeping a copy of the embedding and the head on the way."""
        head = None
        for name, weight in self._iter_named_params():
            if name.endswith("embed_tokens.weight"):
                self.policy_embedding = weight.detach().to(torch.bfloat16, copy=True)
            elif name.endswith("lm_head.weight"):
                head = weight.detach().to(torch.bfloat16, copy=True)
            yield name, weight
        self.policy_lm_head = self.policy_embedding if head is None else head

    def note_drafter_lag(self, policy_step: int) -> None:
        """
        Takes note, when a rollout's samples are there, of how many trainings the engine's drafter has missed.

        TRL syncs before the first rollout of a policy step. What is trained later, between the turns of a tool loop or
        the rollouts of one step, is pushed with the next one, so only the first call for a step counts.
        """
        if policy_step != self._lag_step:
            self._lag_step, self._drafter_lag = policy_step, self.drafter_version - self.pushed_drafter_version

    def observe_rollout(self, acceptance_length: float, draft_tokens: float) -> None:
        """Feeds the alarms after a training rollout."""
        self.alarms.observe_rollout(acceptance_length, draft_tokens, self._drafter_lag)

    def pop_sync_seconds(self) -> float:
        """Seconds spent in weight syncs since the last call."""
        seconds, self.sync_seconds = self.sync_seconds, 0.0
        return seconds


def speculative_config(drafter: str, max_draft_tokens: int, max_num_seqs: int, draft_sampling: str) -> dict:
    """vLLM's `speculative_config` for a drafter whose number of draft tokens is chosen step by step."""
    return {
        "method": "eagle3",
        "model": drafter,
        "num_speculative_tokens": max_draft_tokens,
        # Any table makes the scheduler ask for a length in every step; RolloutEngine puts itself in its place.
        "num_speculative_tokens_per_batch_size": [(1, max_num_seqs, max_draft_tokens)],
        # Reserves memory for the drafter's probabilities; each strategy then says whether they are used.
        "draft_sample_method": "greedy" if draft_sampling == "greedy" else "probabilistic",
    }
