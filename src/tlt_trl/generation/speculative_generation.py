"""TRL's vLLM generation with speculative decoding, a step loop of our own, and a drafter that is kept in sync."""

import functools
import logging
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedTokenizerBase
from trl.generation.vllm_generation import VLLMGeneration, empty_cache

from ..drafter.modeling_drafter import Drafter
from ..drafter.ranks import drafter_of_first_rank
from ..drafter.source import build_drafter
from ..strategy import StepLedger, describe, ledger_metrics, make_selector, strategies_for
from ..telemetry.alarms import Alarms
from ..telemetry.metrics import rollout_metrics
from ..telemetry.reduce import sum_over_ranks
from ..telemetry.timeline import WEIGHT_SYNC, NoTimeline, Timeline
from ..upstream import adapters_for_push, replaced_llm, version_of
from ..vllm_internals.llm import make_rollout_llm_class
from ..vllm_internals.prepare import prepare_vllm
from ..vllm_internals.weights import WeightMismatchError
from .canary import InexactEngineError, failure_message, run_canary
from .cuda_graphs import plan_cuda_graphs
from .drafter_lag import DrafterLag
from .engine import RolloutEngine
from .finite_policy import check_adapters
from .leader import LeadersChoice
from .policy_checks import check_embedding_rows
from .policy_mark import PolicyMark
from .ranks import drafter_folder, failing_together, failures_of_ranks
from .rollout_loop import RolloutLoop


if TYPE_CHECKING:
    from ..tlt_grpo_config import TLTGRPOConfig


logger = logging.getLogger(__name__)


class SpeculativeVLLMGeneration(VLLMGeneration):
    """
    Colocated vLLM generation with speculative decoding; in server mode it is TRL's class unchanged.

    Only three things differ from [`~trl.generation.vllm_generation.VLLMGeneration`]: the engine is built with a
    `speculative_config`, it is stepped by a [`RolloutLoop`], and `sync_weights` pushes policy and drafter together and
    reads them back. TRL's `generate` is used as it is, so that tensor parallelism, images, structured outputs and
    sleep mode keep their one implementation.

    Args:
        args ([`TLTGRPOConfig`]):
            Configuration of the trainer.
        drafter ([`Drafter`], *optional*):
            Drafter to start from. Without it, see [`~tlt_trl.drafter.source.build_drafter`].
        train_dataset (`Iterable[dict]`, *optional*):
            Where the tokens of a reduced vocabulary are counted.
        **kwargs:
            Arguments of [`~trl.generation.vllm_generation.VLLMGeneration`].

    Attributes:
        drafter ([`Drafter`]):
            The drafter whose weights every sync pushes.
        engine ([`RolloutEngine`]), rollout_loop ([`RolloutLoop`]):
            The engine and what steps it.
        policy_embedding, policy_lm_head (`torch.Tensor` of shape (vocab_size, hidden_size)):
            Copies of the policy's embedding and head taken at the last sync: what the drafter trains against.
        drafter_lag ([`DrafterLag`]), alarms ([`Alarms`]):
            Told of trainings of the drafter and of rollouts.
        timeline ([`Timeline`]):
            Where syncs are noted.
        is_exact (`bool`):
            Whether the engine has passed the check at start-up; else it never speculates.
    """

    drafter: Drafter
    engine: RolloutEngine
    rollout_loop: RolloutLoop
    policy_embedding: torch.Tensor
    policy_lm_head: torch.Tensor

    def __init__(
        self,
        *,
        args: "TLTGRPOConfig",
        drafter: Drafter | None,
        train_dataset: Iterable[dict[str, Any]] | None,
        **kwargs: Any,
    ):
        self.args = args
        self.is_exact = True
        self.alarms = Alarms()
        self.timeline: Timeline | NoTimeline = NoTimeline()
        self._given_drafter = drafter
        self._train_dataset = train_dataset
        self._sync_s = 0.0
        self._synced_mark: PolicyMark | None = None
        self._drafter_push_s = 0.0
        self._pushed_versions: tuple[int, ...] = ()  # of the drafter's weights that the engine has
        self.drafter_lag = DrafterLag()
        super().__init__(**kwargs)

    # ---- building --------------------------------------------------------------------------------------------------

    def _init_vllm(self):
        if self.mode != "colocate":
            return super()._init_vllm()

        prepare_vllm()
        check_embedding_rows(self.model, self.trust_remote_code)
        with failing_together(self.accelerator):
            drafter = self._build_drafter().to(self.accelerator.device)
        self.drafter = drafter_of_first_rank(drafter) if self.accelerator.num_processes > 1 else drafter
        with drafter_folder(self.drafter, self.accelerator) as folder:
            with replaced_llm(functools.partial(self._build_llm, folder)):
                super()._init_vllm()  # which ends with a barrier: all engines have read the folder
        self.engine = RolloutEngine(self.llm)
        self.engine.repeats_seeds = self.args.repeats_seeds
        self.rollout_loop = self.llm.rollout_loop = RolloutLoop(self.engine, self._make_selector())
        # A fixed strategy depends on the batch alone, which is the same on all ranks.
        if self.tensor_parallel_size > 1 and self.args.speculation_selector != "fixed":
            selector = self.rollout_loop.selector
            self.rollout_loop.leaders_choice = LeadersChoice(
                selector.strategies, selector.bucket_edges, self._number_of_leader
            )
        self._check_exactness()

    def _build_drafter(self) -> Drafter:
        args = self.args
        tokenizer = self.processing_class
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer = tokenizer.tokenizer
        return build_drafter(
            self.model,
            given=self._given_drafter,
            name_or_path=args.drafter_model_name_or_path,
            vocab_size=args.drafter_vocab_size,
            train_dataset=self._train_dataset,
            tokenizer=tokenizer,
            gather_params=self._dist.gather_params,
        )

    def _make_selector(self):
        args = self.args
        strategies = strategies_for(args.strategies, self.engine.can_look_up)
        options = {}
        if args.speculation_selector == "fixed":
            options["activation_threshold"] = args.speculation_activation_threshold
        elif self.tensor_parallel_size > 1:
            options["min_dwell_steps"] = 1  # `LeadersChoice` holds what it chooses
        return make_selector(
            args.speculation_selector, strategies, self.engine.max_num_seqs, seed=args.seed, **options
        )

    def _number_of_leader(self, number: int) -> int:
        """What the first rank of the tensor-parallel group passes."""
        tensor = torch.tensor([number], device=self.accelerator.device)
        torch.distributed.broadcast(tensor, group=self.tp_group, group_src=0)
        return int(tensor.item())

    def _build_llm(self, drafter_dir: str, llm_class, **trl_kwargs):
        """TRL's engine with a drafter; `vllm_engine_kwargs` have the last word."""
        args = self.args
        kwargs = trl_kwargs | cast(dict, args.vllm_engine_kwargs or {})  # a command line's text is a dict by now
        if self.accelerator.device.type == "cuda":
            self._plan_cuda_graphs(kwargs)
        longest = args.max_draft_tokens
        if kwargs["max_model_len"] is not None and longest >= kwargs["max_model_len"]:
            raise ValueError(
                f"{longest} draft tokens do not fit into a context of {kwargs['max_model_len']} tokens. Raise "
                "`vllm_max_model_length`, or choose shorter `speculation_strategies`."
            )
        is_probabilistic = any(strategy.draft_sampling == "probabilistic" for strategy in args.strategies)
        further = kwargs.pop("speculative_config", None) or {}
        own = speculative_config(drafter_dir, longest, kwargs["max_num_seqs"], is_probabilistic)
        return make_rollout_llm_class(llm_class)(
            speculative_config=further | own,  # the config refuses keys that are in both
            # Without statistics the scheduler counts no drafts.
            disable_log_stats=False,
            **kwargs,
        )

    def _plan_cuda_graphs(self, kwargs: dict) -> None:
        """Adds the sizes to capture, unless the user has said which or wants none."""
        if kwargs.get("enforce_eager") or {"compilation_config", "cudagraph_capture_sizes"} & kwargs.keys():
            return
        lengths = [strategy.num_draft_tokens for strategy in self.args.strategies]
        plan = plan_cuda_graphs(lengths, kwargs["max_num_seqs"])
        kwargs["compilation_config"] = {"cudagraph_capture_sizes": list(plan.sizes)}
        config = self.model.config.get_text_config()
        logger.info(plan.describe(config.num_hidden_layers, config.hidden_size, bytes_per_value=2))

    def _check_exactness(self) -> None:
        """Asks the engine, before anything is trained on its samples, whether it is exact under speculation."""
        # An engine that sleeps at level 2 has no weights yet.
        results = run_canary(self.engine, has_weights=not self.enable_sleep_mode)
        is_exact = all(result.ok for result in results)
        failures = failures_of_ranks(self.accelerator, "" if is_exact else failure_message(results))
        self.is_exact = not failures
        if self.is_exact:
            return
        if self.args.speculation_on_unsupported == "error":
            raise InexactEngineError(failures)
        logger.warning("%s\nThis run goes on without speculation and without a drafter.", failures)
        self.rollout_loop.disabled.add("inexact")

    # ---- weight sync -----------------------------------------------------------------------------------------------

    def sync_weights(self):
        """
        Pushes the policy and the drafter to the engine and reads them back.

        On sharded back ends this is a collective: every rank must call it.
        """
        if self.mode != "colocate":
            return super().sync_weights()
        with self.timeline.interval(WEIGHT_SYNC):
            self._sync_colocated_weights()

    def _sync_colocated_weights(self) -> None:
        started = time.perf_counter()
        if self.enable_sleep_mode:
            # See https://github.com/huggingface/trl/issues/5142: weights must be mapped before they are written.
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        self._synced_mark = None  # a push that ends halfway leaves an engine that holds neither policy
        with failing_together(self.accelerator):
            check_adapters(self.model)
            with adapters_for_push(self.model, PolicyMark.of(self.model).has_disabled_adapters):
                self.engine.push_policy(self._policy_weights(), verify=self.args.vllm_verify_weight_sync)
        if self.is_exact:
            push_started = time.perf_counter()
            self._push_drafter()
            self._drafter_push_s += time.perf_counter() - push_started
        self.engine.reset_prefix_cache()
        # Not before: TRL merges adapters into the weights for the push and takes them out again.
        self._synced_mark = PolicyMark.of(self.model)
        self._sync_s += time.perf_counter() - started

    def holds_policy(self) -> bool:
        """
        Whether the engine's policy is the one that was trained last, whatever has changed it: an optimiser step, a
        checkpoint, a callback, `load_state_dict`.

        Every rank must call it, for all of them sync or none.
        """
        changed = float(PolicyMark.of(self.model) != self._synced_mark)
        changed_ranks = self.accelerator.reduce(torch.tensor([changed], device=self.accelerator.device), "sum")
        return not changed_ranks.item()

    def _push_drafter(self) -> None:
        # Ranks may differ in what they have to push, as after a period of training that failed on one of them.
        is_current, failure = self._engine_has_drafter(), ""
        with failing_together(self.accelerator):
            try:
                if not is_current:
                    if self.drafter.config.head == "policy":
                        self.drafter.copy_head(self.policy_lm_head)
                    self.engine.push_drafter(self.drafter.vllm_weights(), verify=self.args.vllm_verify_weight_sync)
            except WeightMismatchError as error:
                failure = str(error)
        if failures := failures_of_ranks(self.accelerator, failure):
            # A wrong drafter costs speed, not correctness: the run goes on without it.
            self.alarms.set("drafter_mismatch", True, failures)
            self.rollout_loop.disabled.add("drafter_mismatch")
            self._pushed_versions = ()
            return
        if is_current:
            return
        self.alarms.set("drafter_mismatch", False)
        self.rollout_loop.disabled.discard("drafter_mismatch")
        self.drafter_lag.note_pushed()
        self._pushed_versions = self._drafter_versions()

    def _engine_has_drafter(self) -> bool:
        """Whether a push would change nothing that matters."""
        if self.drafter_lag.is_behind:
            return False
        if "not_paying" in self.rollout_loop.disabled:
            return True
        # Sleep level 2 discards the drafter's weights too, and silently: text stays right, acceptance falls to 1.0.
        return not self.enable_sleep_mode and self._pushed_versions == self._drafter_versions()

    def _drafter_versions(self) -> tuple[int, ...]:
        return tuple(version_of(parameter) for parameter in self.drafter.parameters())

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

    @property
    def sampled_temperature(self) -> float:
        """What this rollout is sampled at: `generation_kwargs` or a `rollout_func` may say another than the config."""
        return self.rollout_loop.temperature(default=self.args.temperature)

    # ---- what a rollout did ----------------------------------------------------------------------------------------

    def pop_metrics(self, is_training: bool) -> tuple[dict[str, float], str]:
        """
        What rollouts did since the last call, over all ranks; every rank must call it.

        Args:
            is_training (`bool`):
                Whether they were training rollouts, which the alarms watch.

        Returns:
            `tuple[dict[str, float], str]`: Metrics, and one line in words.
        """
        ledger, stats = self.rollout_loop.pop_ledger(), self.rollout_loop.pop_stats()
        sums = stats.sums(self.args.max_draft_tokens) | {"drafter_push_s": self._drafter_push_s}
        self._drafter_push_s = 0.0
        total, num_engines = self._sum_over_engines(sums, ledger)
        metrics = rollout_metrics(total, self.args.max_draft_tokens, num_engines)
        metrics |= ledger_metrics(self.rollout_loop.selector.strategies, total)
        metrics["tlt/speculation/saved_s"] = total["saved_s"] / num_engines
        metrics["tlt/sync/time_s"], self._sync_s = self._sync_s, 0.0
        metrics["tlt/sync/drafter_s"] = total["drafter_push_s"] / num_engines
        if is_training:
            self.alarms.observe_rollout(
                metrics["tlt/acceptance_length"], metrics["tlt/draft_tokens/proposed"], self.drafter_lag.trainings
            )
        return metrics, describe(metrics, ledger.choices())

    def _sum_over_engines(self, sums: dict[str, float], ledger: StepLedger) -> tuple[dict[str, float], int]:
        # The ranks of a tensor-parallel group have all run the same samples.
        is_leader = self.accelerator.process_index % self.tensor_parallel_size == 0
        own = {name: value * is_leader for name, value in (sums | ledger.sums()).items()}
        return sum_over_ranks(self.accelerator, own), self.accelerator.num_processes // self.tensor_parallel_size


def speculative_config(drafter: str, max_draft_tokens: int, max_num_seqs: int, is_probabilistic: bool) -> dict:
    """vLLM's `speculative_config` for a drafter whose number of draft tokens is chosen step by step."""
    return {
        "method": "eagle3",
        "model": drafter,
        "num_speculative_tokens": max_draft_tokens,
        # Any table makes the scheduler ask for a length in every step; RolloutEngine puts itself in its place.
        "num_speculative_tokens_per_batch_size": [(1, max_num_seqs, max_draft_tokens)],
        # Reserves memory for the drafter's probabilities; each strategy then says whether they are used.
        "draft_sample_method": "probabilistic" if is_probabilistic else "greedy",
    }
