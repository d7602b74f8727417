"""
The only module that touches vLLM's private attributes.

It drives an in-process vLLM V1 engine (what TRL's colocate mode builds) one step at a time, lets the caller decide the
number of draft tokens of every step, reports what the step did, and pushes policy and drafter weights with a
read-back. Everything private that it needs is looked up once, at start-up; when vLLM is not what this module was
written against, the error says so and names the supported versions.
"""

import operator
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from packaging.specifiers import SpecifierSet

from ..vllm_internals import cpu
from ..vllm_internals.read_back import (
    Fingerprint,
    bits_checksum,
    compare_fingerprints,
    fingerprint_of_module,
    fingerprint_of_weight,
)
from .lookup import NgramDrafter


if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


SUPPORTED_VLLM = SpecifierSet(">=0.31,<0.32")


class UnsupportedEngineError(RuntimeError):
    """The vLLM engine is not one that this package knows how to drive."""


class WeightMismatchError(RuntimeError):
    """The weights in the engine are not those that were pushed."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """
    What one engine step did.

    A step verifies the draft tokens that the step before it proposed, and proposes those of the next one; the two
    numbers differ in the step in which the strategy changes.

    Attributes:
        batch_size (`int`):
            Requests that ran in this step.
        num_verified (`int`):
            Draft tokens per request that this step verified (the largest over its requests).
        num_proposed (`int`):
            Draft tokens per request that this step proposed for the next one.
        drafts (`int`):
            Requests that had draft tokens verified.
        draft_tokens (`int`):
            Draft tokens verified, summed over requests.
        drafted_by_position (`tuple[int, ...]`):
            Number of requests that had a draft token at that position, one entry per position.
        accepted_by_position (`tuple[int, ...]`):
            Number of requests whose draft token at that position was accepted, one entry per position.
        emitted_tokens (`int`):
            Completion tokens: accepted draft tokens plus one for each request that sampled, without what lies behind
            the end of an answer.
        context_tokens (`int`):
            Tokens in the KV cache of the requests of this step before it ran.
        has_prefill (`bool`):
            Whether a request was in its prompt (such a step costs more and tells nothing about decoding).
        seconds (`float`):
            Wall-clock time of the step.
    """

    batch_size: int
    num_verified: int
    num_proposed: int
    drafts: int
    draft_tokens: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    emitted_tokens: int
    context_tokens: int
    has_prefill: bool
    seconds: float


class DraftLengthSchedule:
    """
    Stands in for vLLM's `dynamic_sd_lookup` list, which the scheduler indexes by batch size in every step.

    Being asked by the scheduler itself, at the moment it knows the batch of this very step, is what makes the choice
    exact: a table written before the step has to guess which waiting requests the step will admit.
    """

    def __init__(self, max_draft_tokens: int):
        self.max_draft_tokens = max_draft_tokens
        self.choose: Callable[[int], int] = lambda batch_size: max_draft_tokens

    def __getitem__(self, batch_size: int) -> int:
        num_draft_tokens = self.choose(batch_size)
        if not 0 <= num_draft_tokens <= self.max_draft_tokens:
            raise ValueError(
                f"The strategy asks for {num_draft_tokens} draft tokens, but the engine was built for 0 to "
                f"{self.max_draft_tokens}. Raise `num_draft_tokens` in the config or drop that strategy."
            )
        return num_draft_tokens


def check_vllm_version() -> None:
    """Raises [`UnsupportedEngineError`] unless the installed vLLM is one that was tested."""
    import vllm

    if not SUPPORTED_VLLM.contains(vllm.__version__.split("+")[0], prereleases=True):
        raise UnsupportedEngineError(
            f"vLLM {vllm.__version__} is installed, but speculative rollouts were tested with vllm{SUPPORTED_VLLM} "
            "only. Install a version in that range, or use TRL's GRPOTrainer, which runs without speculation."
        )


def choose_model_runner() -> None:
    """
    Chooses vLLM's V1 model runner, the one that this module drives; to be called before an engine is built.

    vLLM takes the V2 runner by default where Triton works, that is on CUDA. Who has set the variable is not overruled:
    [`RolloutEngine`] then says what is wrong.
    """
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def keep_drafter_head() -> None:
    """
    Keeps vLLM from giving the drafter the policy's own `lm_head`; to be called before an engine is built.

    vLLM shares the head where the two are equal when the engine starts, and a drafter made from its policy starts with
    a copy of it. Every later push of the drafter would then overwrite the policy's head (and, where it is tied, its
    embedding) and the engine would sample from another policy. On CPU packed heads are empty tensors, which are always
    equal.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    original = SpecDecodeBaseProposer._maybe_share_lm_head
    if original.__name__ == "share_missing_lm_head":
        return

    def share_missing_lm_head(proposer, target_language_model):
        if not proposer.model.has_own_lm_head:
            original(proposer, target_language_model)

    SpecDecodeBaseProposer._maybe_share_lm_head = share_missing_lm_head


def supports_eagle3(architectures: Sequence[str]) -> bool:
    """Whether vLLM's class for one of these architectures gives away the hidden states that the drafter reads."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    # The first name that vLLM knows decides, as in its own resolution.
    known = next((name for name in architectures if name in ModelRegistry.models), None)
    return known is not None and supports_eagle3(ModelRegistry.models[known].load_model_cls())


def no_auxiliary_states_message(architectures: Sequence[str]) -> str:
    """What to tell somebody whose policy cannot be drafted for."""
    return (
        f"A policy of architecture {', '.join(architectures)} cannot be drafted for: its class in vLLM does not give "
        "away auxiliary hidden states (`SupportsEagle3`), which the drafter reads. Those of Llama, Qwen2 and Qwen3 "
        "do; for this policy use TRL's GRPOTrainer, which runs without speculation."
    )


class DeferredDrafter:
    """
    Makes steps without draft tokens free of the drafter.

    vLLM runs the drafter's first pass in every step, with 0 draft tokens too, since the drafter's KV cache must hold
    every token before it can draft again. For a drafter of one layer, keys and values depend on that layer's input
    alone: they can be computed later, for many steps at once, without attention, MLP or head. This class takes the
    place of `proposer.propose`, keeps the inputs of steps without draft tokens, and writes their keys and values when
    drafting comes back.

    Args:
        proposer:
            vLLM's EAGLE proposer, whose drafter has one layer.
        max_tokens (`int`, *optional*, defaults to `2048`):
            Inputs kept at most before they are written all the same. A token takes two bytes for each hidden unit of
            the policy layers that the drafter reads.
    """

    def __init__(self, proposer, max_tokens: int = 2048):
        self._proposer = proposer
        self._propose = proposer.propose
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        proposer.propose = self.propose

    def propose(self, num_speculative_tokens: int, **inputs):
        if num_speculative_tokens == 0:
            return self._defer(**inputs)
        self.catch_up()
        return self._propose(num_speculative_tokens, **inputs)

    def _defer(
        self,
        target_token_ids,
        target_positions,
        target_hidden_states,
        next_token_ids,
        token_indices_to_sample,
        common_attn_metadata,
        **_,
    ):
        # Position t holds the token after it, as in the proposer's own first pass; the last one was just sampled. What
        # lies behind it was rejected: those keys and values are overwritten when their positions are sampled again.
        input_ids = target_token_ids.roll(-1)
        if token_indices_to_sample is None:
            token_indices_to_sample = common_attn_metadata.query_start_loc[1:] - 1
        input_ids[token_indices_to_sample] = next_token_ids.to(input_ids.dtype)
        # The engine reuses its buffers in the next step, so all of them are copied.
        slots = common_attn_metadata.slot_mapping[: len(input_ids)].clone()
        self._inputs.append((input_ids, target_positions.clone(), target_hidden_states.clone(), slots))
        self.num_tokens += len(input_ids)
        if self.num_tokens >= self.max_tokens:
            self.catch_up()
        # The engine takes them from here after every call. Left in place, those of an earlier draft would be what
        # looked-up tokens are verified against, and text would no longer follow the policy.
        self._proposer._last_draft_probs = None
        batch_size = common_attn_metadata.num_reqs
        return torch.empty(batch_size, 0, dtype=torch.int64, device=target_token_ids.device)

    @torch.inference_mode()
    def catch_up(self) -> None:
        """Writes the keys and values of all inputs that were kept."""
        if not self._inputs:
            return
        input_ids, positions, aux_hidden_states, slots = (
            torch.cat(parts, dim=-1 if parts[0].dim() == 1 else 0) for parts in zip(*self._inputs, strict=True)
        )
        self.discard()
        newest = _last_of_each(slots)
        model = self._proposer.model
        layer = model.model.layers[0]
        embeds = layer.input_layernorm(model.embed_input_ids(input_ids[newest]))
        hidden_states = layer.hidden_norm(model.combine_hidden_states(aux_hidden_states[newest]))
        attention = layer.self_attn
        qkv, _ = attention.qkv_proj(torch.cat([embeds, hidden_states], dim=-1))
        query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
        _, key = attention.rotary_emb(positions[newest], query, key)
        shape = (-1, attention.attn.num_kv_heads, attention.attn.head_size)
        attention.attn.impl.do_kv_cache_update(
            attention.attn, key.reshape(shape), value.reshape(shape), attention.attn.kv_cache, slots[newest]
        )

    def discard(self) -> None:
        """Forgets the inputs that were kept: the KV cache that they belong to is gone."""
        self._inputs, self.num_tokens = [], 0


def _last_of_each(slots: torch.Tensor) -> torch.Tensor:
    """
    Indices of the last occurrence of every slot, in order.

    A block that was freed and handed to another request occurs twice; written in one go, the older entry could win.
    """
    last = {slot: index for index, slot in enumerate(slots.tolist())}
    return torch.tensor(sorted(last.values()), device=slots.device)


class RolloutEngine:
    """
    Drives one in-process vLLM engine with speculative decoding.

    Args:
        llm (`vllm.LLM`):
            Engine built in this process (`distributed_executor_backend="external_launcher"`), with or without a
            `speculative_config`.
        fast_cpu_sampling (`bool`, *optional*, defaults to `True`):
            On CPU, let this engine sample by [`~cpu.sample_by_inversion`]. `False` keeps vLLM's sampler, to
            measure what speculation alone gains.

    Raises:
        [`UnsupportedEngineError`]: If the engine runs in another process, uses a model runner that is not known here,
        or lacks an attribute that this module needs.
    """

    def __init__(self, llm: "LLM", fast_cpu_sampling: bool = True):
        check_vllm_version()
        self.llm = llm
        self._llm_engine = llm.llm_engine
        self._core = core = self._require("llm_engine.engine_core.engine_core")
        self._require("batch_queue", core)
        self._scheduler = self._require("scheduler", core)
        self._worker = self._require("model_executor.driver_worker.worker", core)
        self._runner = self._require("model_runner", self._worker)
        self._require_known_runner()
        self.speculative_config = self._require("vllm_config.speculative_config", self._runner)
        self._proposer = self._runner.drafter if self.speculative_config is not None else None
        if self._proposer is not None and self.drafter_module().lm_head is self.target_module().lm_head:
            raise UnsupportedEngineError(
                "The engine's drafter shares the policy's `lm_head`: pushing the drafter would overwrite the policy. "
                "Call `tlt_trl.generation.engine.keep_drafter_head()` before the engine is built."
            )
        self._step_facts: dict[str, Any] = {}
        self._observe_scheduler()
        self._process_tokens_one_by_one()
        # Draft tokens to look up in earlier text, in place of the drafter's, after the step that is scheduled next.
        self.num_lookup_tokens = 0
        self.ngram: NgramDrafter | None = None  # where to look them up
        self.schedule: DraftLengthSchedule | None = None
        self._deferred: DeferredDrafter | None = None
        if self.speculative_config is not None:
            self._require("dynamic_sd_lookup", self._scheduler)
            self.schedule = DraftLengthSchedule(self.speculative_config.num_speculative_tokens)
            self._scheduler.dynamic_sd_lookup = self.schedule
            self._require("_last_draft_probs", self._proposer)
            self._deferred = DeferredDrafter(self._proposer) if self._can_defer() else None
            self._draft_greedily_under_grammars()
            self._refuse_broken_draft_probs()
            self._proposer._greedy_sample = self._greedy_draft_tokens
            if self.can_look_up:
                self._look_up_draft_tokens()
        if self.is_cpu and fast_cpu_sampling:
            cpu.sample_by_inversion(self._require("sampler.topk_topp_sampler", self._runner))

    # ---- start-up checks -------------------------------------------------------------------------------------------

    def _require(self, path: str, start: Any = None) -> Any:
        start = self.llm if start is None else start
        try:
            return operator.attrgetter(path)(start)
        except AttributeError as error:
            raise UnsupportedEngineError(
                f"`{path}` was not found on {type(start).__name__}. This package drives vllm{SUPPORTED_VLLM} built in "
                "the training process (TRL's `vllm_mode='colocate'`); another version or a multi-process engine looks "
                "different inside."
            ) from error

    def _require_known_runner(self) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        # The V2 runner (vllm.v1.worker.gpu.model_runner) keeps its draft tokens and its weights elsewhere.
        if not isinstance(self._runner, GPUModelRunner):
            raise UnsupportedEngineError(
                f"vLLM uses the model runner {type(self._runner).__module__}.{type(self._runner).__name__}, which is "
                "not supported. Set VLLM_USE_V2_MODEL_RUNNER=0 before the trainer is built."
            )

    def _greedy_draft_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        The drafter's best tokens, from its own vocabulary.

        vLLM scatters the reduced vocabulary's logits into a row as wide as the policy's and takes the maximum there.
        """
        model = self._proposer.model
        draft_ids = model.logits_processor(model.lm_head, hidden_states).argmax(dim=-1)
        offsets = model.draft_id_to_target_id
        return draft_ids if offsets is None else draft_ids + offsets[draft_ids]

    def _can_defer(self) -> bool:
        config = self.speculative_config.draft_model_config.hf_config
        # Groups of layers with different attention share the KV cache's memory: a block that a request has left may
        # hold the policy's keys and values by the time the drafter's are written.
        groups = self._require("kv_cache_config.kv_cache_groups", self._runner)
        return self.speculative_config.method == "eagle3" and config.num_hidden_layers == 1 and len(groups) == 1

    def _draft_greedily_under_grammars(self) -> None:
        """
        Leaves probabilistic drafts aside while a request has structured outputs.

        vLLM's scheduler drops a draft token that the grammar forbids. Whether one is dropped then depends on which was
        drawn, the position is sampled as if nothing had been drafted, and text no longer follows the policy: the rule
        of rejection sampling holds for all tokens of a draft or for none.
        """
        propose = self._proposer.propose

        def proposed(num_speculative_tokens, **inputs):
            wanted = self._proposer._enable_probabilistic_draft_probs
            has_grammar = any(request.use_structured_output for request in self._scheduler.running)
            self._proposer._enable_probabilistic_draft_probs = wanted and not has_grammar
            try:
                return propose(num_speculative_tokens, **inputs)
            finally:
                self._proposer._enable_probabilistic_draft_probs = wanted

        self._proposer.propose = proposed

    def _refuse_broken_draft_probs(self) -> None:
        """
        Verifies draft tokens whose probabilities are not finite as certain ones, which is exact for any token.

        The rejection sampler would reject them and draw from a distribution that is not one: its last token, always.
        """
        sample = self._require("_sample_draft_tokens", self._proposer)

        def sampled(hidden_states, sampling_metadata):
            tokens, probs = sample(hidden_states, sampling_metadata)
            if probs is not None:
                certain = torch.zeros_like(probs).scatter_(1, tokens[:, None].long(), 1.0)
                probs = torch.where(probs.sum(dim=-1, keepdim=True).isfinite(), probs, certain)
            return tokens, probs

        self._proposer._sample_draft_tokens = sampled

    @property
    def device(self) -> torch.device:
        return self._runner.device

    @property
    def dtype(self) -> torch.dtype:
        return self._worker.vllm_config.model_config.dtype

    @property
    def is_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def can_look_up(self) -> bool:
        """
        Whether draft tokens can be looked up in text: an asynchronous scheduler never has a step's tokens in time, and
        a drafter that cannot be deferred would run in every step all the same.
        """
        return self._deferred is not None and not self._worker.vllm_config.scheduler_config.async_scheduling

    @property
    def tensor_parallel_size(self) -> int:
        return self._worker.vllm_config.parallel_config.tensor_parallel_size

    @property
    def max_num_seqs(self) -> int:
        return self._worker.vllm_config.scheduler_config.max_num_seqs

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens of prompt and completion, over all requests, that the KV cache has room for."""
        cache = self._worker.vllm_config.cache_config
        return cache.num_gpu_blocks * cache.block_size

    # ---- stepping --------------------------------------------------------------------------------------------------

    def _observe_scheduler(self) -> None:
        """
        Wraps `scheduler.update_from_output`, where a step's schedule and its sampled tokens meet.

        vLLM's own `SpecDecodingStats` cannot be used: `make_spec_decoding_stats` returns None for a request without
        draft tokens and with it drops what was counted for the requests before it.
        """
        update_from_output = self._require("update_from_output", self._scheduler)

        def observed(scheduler_output, model_runner_output):
            facts = self._read_step(scheduler_output, model_runner_output)
            outputs = update_from_output(scheduler_output, model_runner_output)
            # Not what was sampled: that goes on behind the end of an answer, by as much as was accepted there.
            facts["emitted_tokens"] = sum(
                len(output.new_token_ids) for of_client in outputs.values() for output in of_client.outputs
            )
            self._step_facts = facts
            return outputs

        self._scheduler.update_from_output = observed

    def _read_step(self, scheduler_output, model_runner_output) -> dict[str, Any]:
        sampled = model_runner_output.sampled_token_ids
        row = model_runner_output.req_id_to_index
        drafts = scheduler_output.scheduled_spec_decode_tokens
        scheduled = scheduler_output.num_scheduled_tokens
        drafted = [0] * max((len(tokens) for tokens in drafts.values()), default=0)
        accepted = [0] * len(drafted)
        for request_id, tokens in drafts.items():
            for position in range(len(tokens)):
                drafted[position] += 1
            for position in range(min(len(sampled[row[request_id]]) - 1, len(tokens))):
                accepted[position] += 1
        return {
            "batch_size": len(scheduled),
            "num_verified": len(accepted),
            "num_proposed": scheduler_output.num_spec_tokens_to_schedule + self.num_lookup_tokens,
            "drafts": len(drafts),
            "draft_tokens": sum(len(tokens) for tokens in drafts.values()),
            "drafted_by_position": tuple(drafted),
            "accepted_by_position": tuple(accepted),
            "context_tokens": sum(scheduler_output.scheduled_cached_reqs.num_computed_tokens),
            "has_prefill": any(
                num_tokens != 1 + len(drafts.get(request_id, ())) for request_id, num_tokens in scheduled.items()
            ),
        }

    def _look_up_draft_tokens(self) -> None:
        """
        Wraps `scheduler.update_draft_token_ids`, by which the draft tokens of a step reach the next one.

        The drafter was asked for none then, which [`DeferredDrafter`] makes free, and each request gets as many as
        were found for it.
        """
        update_draft_token_ids = self._require("update_draft_token_ids", self._scheduler)

        def updated(draft_token_ids):
            if self.num_lookup_tokens:
                for row, request_id in enumerate(draft_token_ids.req_ids):
                    draft_token_ids.draft_token_ids[row] = self._look_up(request_id)
            update_draft_token_ids(draft_token_ids)

        self._scheduler.update_draft_token_ids = updated

    def _look_up(self, request_id: str) -> list[int]:
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished() or request.is_prefill_chunk or request.prompt_token_ids is None:
            return []
        return self.ngram.propose(
            request_id, request.prompt_token_ids, request._output_token_ids, self.num_lookup_tokens
        )

    def _process_tokens_one_by_one(self) -> None:
        """
        Hands the tokens of a request that has stop strings to the output processor one at a time.

        vLLM looks for stop strings after it has taken all tokens of a step, and cuts the text but not the token ids:
        under speculation the tokens accepted behind a stop string stay in the completion and would be trained on.
        """
        from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

        processor = self._require("llm_engine.output_processor")
        process_outputs = self._require("process_outputs", processor)

        def processed(engine_core_outputs, *args, **kwargs):
            one_by_one = []
            for output in engine_core_outputs:
                state = processor.request_states.get(output.request_id)
                detokenizer = None if state is None else state.detokenizer
                if isinstance(detokenizer, BaseIncrementalDetokenizer) and detokenizer.stop:
                    one_by_one += _split_by_token(output)
                else:
                    one_by_one.append(output)
            # Once a stop string is found the processor forgets the request and ignores the tokens that follow.
            return process_outputs(one_by_one, *args, **kwargs)

        processor.process_outputs = processed

    def has_unfinished_requests(self) -> bool:
        # An asynchronous scheduler has one more step under way when the last request ends; left there, it would be
        # taken for the first one of the next rollout.
        return self._llm_engine.has_unfinished_requests() or bool(self._core.batch_queue)

    def abort_unfinished(self) -> None:
        """
        Drops all unfinished requests. After an exception in the middle of a rollout they would be the first outputs of
        the next one, and hold keys and values of old weights in the cache.
        """
        requests = self._require("llm_engine.output_processor.request_states")
        self._llm_engine.abort_request(list(requests), internal=True)
        while self.has_unfinished_requests():
            self._llm_engine.step()

    def step(self) -> tuple[list["RequestOutput"], EngineStep | None]:
        """
        Runs one engine step.

        Returns:
            `tuple[list[RequestOutput], EngineStep | None]`: The request outputs of the step and what it did; `None`
            when nothing ran (an asynchronous scheduler returns its first output one step later).
        """
        self._step_facts = {}
        started = time.perf_counter()
        outputs = self._llm_engine.step()
        seconds = time.perf_counter() - started
        if not self._step_facts or not self._step_facts["batch_size"]:
            return outputs, None
        return outputs, EngineStep(seconds=seconds, **self._step_facts)

    def set_probabilistic_drafts(self, probabilistic: bool) -> None:
        """
        Switches between greedy and probabilistic draft sampling, effective from the next proposal.

        Both are lossless: the proposer hands its probabilities to the rejection sampler only in the second mode.
        """
        self._proposer._enable_probabilistic_draft_probs = probabilistic

    # ---- the canary's questions ------------------------------------------------------------------------------------

    @torch.no_grad()
    def rejection_sample(
        self,
        logits: torch.Tensor,
        draft_token_ids: torch.Tensor,
        draft_probs: torch.Tensor | None,
        temperature: torch.Tensor,
        top_p: float,
        top_k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Runs the engine's own rejection sampler on given logits.

        Args:
            logits (`torch.Tensor` of shape (batch_size, k + 1, vocab_size)):
                Policy logits at the k draft positions and at the bonus position.
            draft_token_ids (`torch.Tensor` of shape (batch_size, k)):
                Draft tokens.
            draft_probs (`torch.Tensor` of shape (batch_size, k, vocab_size), *optional*):
                Distributions that the draft tokens were sampled from; `None` for greedy drafts.
            temperature (`torch.Tensor` of shape (batch_size,)):
                Temperature of each request.
            top_p (`float`), top_k (`int`):
                Filters, the same for all requests; 1.0 and 0 switch them off.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Emitted tokens, -1 after the first rejection, and their log-probs,
            both of shape (batch_size, k + 1).
        """
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        batch_size, num_positions, vocab_size = logits.shape
        device = logits.device
        rows = torch.arange(batch_size * num_positions, dtype=torch.int32, device=device).view(batch_size, -1)
        metadata = SpecDecodeMetadata(
            draft_token_ids=draft_token_ids.flatten().int(),
            num_draft_tokens=[num_positions - 1] * batch_size,
            cu_num_draft_tokens=rows[:, 0] // num_positions * (num_positions - 1) + num_positions - 1,
            cu_num_sampled_tokens=rows[:, -1] + 1,
            target_logits_indices=rows[:, :-1].flatten(),
            bonus_logits_indices=rows[:, -1].contiguous(),
            logits_indices=rows.flatten(),
        )
        ones = torch.ones(batch_size, device=device)
        sampling = SamplingMetadata(
            temperature=temperature.clone(),
            all_greedy=False,
            all_random=True,
            top_p=ones * top_p if top_p < 1.0 else None,
            top_k=torch.full((batch_size,), top_k, dtype=torch.int32, device=device) if top_k else None,
            generators={},
            max_num_logprobs=0,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=ones * 0,
            presence_penalties=ones * 0,
            repetition_penalties=ones,
            output_token_ids=[[] for _ in range(batch_size)],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )
        output = self._runner.rejection_sampler(
            metadata,
            None if draft_probs is None else draft_probs.reshape(-1, vocab_size).contiguous(),
            logits.reshape(-1, vocab_size).float().contiguous(),
            sampling,
        )
        logprobs = output.logprobs_tensors.logprobs[:, 0].view(batch_size, num_positions)
        return output.sampled_token_ids.long(), logprobs

    def speculative_and_plain_logprobs(
        self, prompt_token_ids: list[int], num_samples: int = 4, num_tokens: int = 24
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Samples with as many draft tokens as possible, then scores the same tokens in a plain pass.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Log-probs from the speculative rollout and from the plain pass, both
            of shape (tokens,).
        """
        from vllm import SamplingParams

        choose = self.schedule.choose
        try:
            self.schedule.choose = lambda batch_size: self.schedule.max_draft_tokens
            params = SamplingParams(
                temperature=1.0, max_tokens=num_tokens, logprobs=0, ignore_eos=True, detokenize=False
            )
            samples = self._generate([prompt_token_ids] * num_samples, params)
            self.schedule.choose = lambda batch_size: 0
            params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
            scored = self._generate([prompt_token_ids + list(s.token_ids) for s, _ in samples], params)
        finally:
            self.schedule.choose = choose
            self.reset_prefix_cache()
        speculative, plain = [], []
        for (sample, _), (_, prompt_logprobs) in zip(samples, scored, strict=True):
            answer = prompt_logprobs[len(prompt_token_ids) :]
            for token, at_sampling, in_pass in zip(sample.token_ids, sample.logprobs, answer, strict=True):
                speculative.append(at_sampling[token].logprob)
                plain.append(in_pass[token].logprob)
        return torch.tensor(speculative), torch.tensor(plain)

    def _generate(self, prompts: list[list[int]], params) -> list[tuple[Any, Any]]:
        self.llm.enqueue([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        finished = []
        while self.has_unfinished_requests():
            finished += [output for output in self._llm_engine.step() if output.finished]
        finished.sort(key=lambda output: int(output.request_id))
        return [(output.outputs[0], output.prompt_logprobs) for output in finished]

    def reset_prefix_cache(self) -> None:
        """
        Forgets what the engine has cached of earlier requests, which was computed with other weights.

        Raises:
            `RuntimeError`: If requests are unfinished; vLLM then keeps the cache.
        """
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(
                "The engine has unfinished requests, whose keys and values were computed with other weights. Weights "
                "can be synced between rollouts only; `abort_unfinished` drops what is left of one."
            )
        if self._deferred is not None:
            self._deferred.discard()

    def shutdown(self) -> None:
        """
        Ends the engine; neither it nor its `vllm.LLM` can be used afterwards. Its memory comes back when the last
        references to both are gone and the garbage collector has run, for they refer to each other; until here vLLM
        hides from the collector what it has built.
        """
        self._require("llm_engine.engine_core").shutdown()

    # ---- weights ---------------------------------------------------------------------------------------------------

    def push_target(self, weights: Iterable[tuple[str, torch.Tensor]], verify: bool = True) -> None:
        """
        Loads the policy's weights into the engine, then reads them back.

        Args:
            weights (`Iterable[tuple[str, torch.Tensor]]`):
                Names in checkpoint form and full tensors, one at a time (gathering one may be a collective).
            verify (`bool`, *optional*, defaults to `True`):
                Compare what the engine now holds with what was pushed.

        Raises:
            [`WeightMismatchError`]: If a weight in the engine differs from the one pushed.
        """
        from vllm.config import set_current_vllm_config

        fingerprints: dict[str, Fingerprint] = {}
        # A tensor-parallel rank holds slices of what is pushed; slices are not compared.
        verify = verify and self.tensor_parallel_size == 1

        def observed():
            for name, tensor in weights:
                if verify:
                    fingerprints[name] = fingerprint_of_weight(tensor, self.dtype)
                yield name, tensor
            # A tied head is not among the weights, but the engine may multiply by a copy of its own.
            if verify and "lm_head.weight" not in fingerprints and "model.embed_tokens.weight" in fingerprints:
                fingerprints["lm_head.weight"] = fingerprints["model.embed_tokens.weight"]

        model = self._runner.model
        with set_current_vllm_config(self._worker.vllm_config), torch.no_grad():
            if self.is_cpu:
                # The CPU backend packs linear weights and drops their loaders; the layerwise reload rebuilds both.
                self._runner.reload_weights(weights_iterator=observed())
                self._repack_tied_head(model)
            else:
                for name, tensor in observed():
                    model.load_weights([(name, tensor)])
        self._check_read_back("policy", self.target_module(), fingerprints)

    @staticmethod
    def _repack_tied_head(model: torch.nn.Module) -> None:
        """
        Packs a tied head anew from the embedding that was just loaded.

        vLLM's CPU backend multiplies by a packed copy of the head. The layerwise reload refreshes that copy only for
        layers whose own weights it loads; a tied head has none, so the engine would keep sampling with the head of the
        checkpoint while everything below it is new.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def push_drafter(self, weights: Iterable[tuple[str, torch.Tensor]], verify: bool = True) -> None:
        """
        Loads the drafter's weights into the engine, then reads them back.

        The drafter shares the policy's embedding inside the engine, so an `embed_tokens` among the weights is refused:
        loading it would overwrite the policy's (a fault of TLT's public code, which broke losslessness).

        Args:
            weights (`Iterable[tuple[str, torch.Tensor]]`):
                Names in the EAGLE-3 checkpoint layout and tensors.
            verify (`bool`, *optional*, defaults to `True`):
                Compare what the engine now holds with what was pushed.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        weights = list(weights)
        if shared := [name for name, _ in weights if "embed_tokens" in name]:
            raise ValueError(f"The drafter shares the policy's embedding; refusing to load {shared} over it.")
        model = self.drafter_module()
        policy_embedding = bits_checksum(self.target_embedding().data) if verify else None
        with set_current_vllm_config(self._worker.vllm_config), torch.no_grad():
            if self.is_cpu:
                initialize_layerwise_reload(model)
                model.load_weights(weights)
                finalize_layerwise_reload(model, self.speculative_config.draft_model_config)
            else:
                model.load_weights(weights)
        if verify and bits_checksum(self.target_embedding().data) != policy_embedding:
            raise UnsupportedEngineError(
                "Loading the drafter changed the policy's embedding in the engine. Please report this with the vLLM "
                "version and the model's name."
            )
        if verify:
            dtype = self.speculative_config.draft_model_config.dtype
            self._check_mapping(model, dict(weights))
            fingerprints = {
                name.replace("midlayer.", "layers.0."): fingerprint_of_weight(tensor, dtype)
                for name, tensor in weights
                if tensor.is_floating_point()
            }
            self._check_read_back("drafter", model, fingerprints)

    def _check_read_back(self, what: str, model: torch.nn.Module, pushed: dict[str, Fingerprint]) -> None:
        if self.tensor_parallel_size > 1 or not pushed:
            return
        with torch.no_grad():
            mismatches = compare_fingerprints(
                pushed, lambda name, shape: fingerprint_of_module(model, name, shape, self._multiply)
            )
        if mismatches:
            raise WeightMismatchError(
                f"After the weight sync the engine's {what} differs from the one pushed in {len(mismatches)} tensors, "
                f"first {mismatches[0]}. Please report this with the vLLM version and the model's name."
            )

    @staticmethod
    def _check_mapping(model: torch.nn.Module, pushed: dict[str, torch.Tensor]) -> None:
        """An engine with another mapping drafts other tokens than the drafter meant: right text, acceptance near 1."""
        if "d2t" in pushed and not torch.equal(model.draft_id_to_target_id.cpu(), pushed["d2t"].cpu()):
            raise WeightMismatchError(
                "After the weight sync the engine's mapping of draft tokens (`d2t`) differs from the one pushed. "
                "Please report this with the vLLM version and the model's name."
            )

    @staticmethod
    def _multiply(module: torch.nn.Module, row: torch.Tensor) -> torch.Tensor | None:
        """`row` of shape (1, in_features) times a layer's weight, by the kernel and the copy that decoding uses."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        if not isinstance(module, LinearBase | ParallelLMHead):
            return None
        row = row.to(module.weight.device, module.weight.dtype)
        return module.quant_method.apply(module, row, None)

    def target_module(self) -> torch.nn.Module:
        return self._runner.get_model()

    def drafter_module(self) -> torch.nn.Module:
        return self._proposer.model

    def target_embedding(self) -> torch.Tensor:
        """The engine's own embedding of the policy, shape (vocab_size, hidden_size); the drafter shares it."""
        return self.target_module().model.embed_tokens.weight

    def drafter_embedding(self) -> torch.Tensor:
        return self.drafter_module().model.embed_tokens.weight


def _split_by_token(output) -> list:
    """One `EngineCoreOutput` per token; what ends a request stays with the last, what comes once with the first."""
    import msgspec

    last = len(output.new_token_ids) - 1
    if last < 1:
        return [output]
    parts = []
    for position, token in enumerate(output.new_token_ids):
        changes = {"new_token_ids": [token]}
        if output.new_logprobs is not None:
            changes["new_logprobs"] = output.new_logprobs.slice_request(position, 1)
        if position > 0:
            changes |= {"new_prompt_logprobs_tensors": None, "prefill_stats": None, "events": None}
        if position < last:
            changes |= {"finish_reason": None, "stop_reason": None, "routed_experts": None}
        parts.append(msgspec.structs.replace(output, **changes))
    return parts
