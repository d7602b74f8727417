"""
One in-process vLLM engine (what TRL's colocate mode builds), driven one step at a time.

The caller chooses the speculation of every step, hears what the step did, and pushes policy and drafter weights with a
read-back. What is private in vLLM is known to `vllm_internals/` alone.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ..strategy.strategy import Strategy
from ..vllm_internals import cpu, probes
from ..vllm_internals.contract import check_vllm_version
from ..vllm_internals.cpu_verification import verify_in_one_pass
from ..vllm_internals.outputs import process_tokens_one_by_one
from ..vllm_internals.parts import EngineParts
from ..vllm_internals.proposer import SteeredProposer
from ..vllm_internals.requests import accept_requests_for_plain_steps
from ..vllm_internals.scheduler import EngineStep, SteeredScheduler
from ..vllm_internals.unfinished import EngineRequests
from ..vllm_internals.weights import EngineWeights
from .lookup import LookupDrafter
from .sampling_parameters import inexact_parameter, remedy_for


if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams


logger = logging.getLogger(__name__)


class RolloutEngine:
    """
    Drives one in-process vLLM engine with speculative decoding.

    Args:
        llm (`vllm.LLM`):
            Engine built in this process (`distributed_executor_backend="external_launcher"`), with or without a
            `speculative_config`, that no other `RolloutEngine` drives.
        fast_cpu_sampling (`bool`, *optional*, defaults to `True`):
            On CPU, let this engine sample by [`~tlt_trl.vllm_internals.cpu.sample_by_inversion`] and verify by
            [`~tlt_trl.vllm_internals.cpu_verification.verify`]. `False` keeps vLLM's samplers, to measure what
            speculation alone gains.

    Attributes:
        weights ([`~tlt_trl.vllm_internals.weights.EngineWeights`]):
            Policy and drafter inside the engine.
        requests ([`~tlt_trl.vllm_internals.unfinished.EngineRequests`]):
            Its unfinished requests, which can be taken out between two steps.
        proposer ([`~tlt_trl.vllm_internals.proposer.SteeredProposer`], *optional*):
            `None` in a plain engine.
        lookup ([`LookupDrafter`]):
            Where strategies of the method "ngram" look their draft tokens up.
        repeats_seeds (`bool`):
            Whether every step drafts the same number of tokens greedily, so that a request with a seed gives the same
            text again. Else steps with such a request are plain.

    Raises:
        [`UnsupportedEngineError`]: If the engine runs in another process, uses a model runner that is not known, or
        lacks an attribute that this package needs.
    """

    def __init__(self, llm: "LLM", fast_cpu_sampling: bool = True):
        check_vllm_version()
        self.llm = llm
        self._parts = parts = EngineParts.of(llm)
        self.weights = EngineWeights(parts)
        self.requests = EngineRequests(parts)
        self.proposer: SteeredProposer | None = None
        max_draft_tokens = 0
        if parts.speculative_config is not None:
            max_draft_tokens = parts.speculative_config.num_speculative_tokens
            self.proposer = SteeredProposer(parts.proposer, parts.can_defer, parts.has_grammar)
            accept_requests_for_plain_steps(parts)
        # A drafter that cannot be deferred would run in every step all the same, and an asynchronous scheduler never
        # has a step's tokens in time.
        self.can_look_up = parts.can_defer and not parts.is_asynchronous
        on_choice = self.proposer.use if self.proposer is not None else lambda strategy: None
        self._scheduler = SteeredScheduler(parts.scheduler, max_draft_tokens, self.can_look_up, on_choice)
        self._scheduler.look_up = self._look_up
        self._scheduler.is_exact = self._is_exact
        self.repeats_seeds = False
        self._warned_of: set[str] = set()
        self.lookup = LookupDrafter()
        process_tokens_one_by_one(parts.llm_engine)
        if parts.is_cpu and fast_cpu_sampling:
            cpu.sample_by_inversion(parts.sampler)
            if self.proposer is not None:
                verify_in_one_pass(parts.verifier)

    @property
    def device(self) -> torch.device:
        return self._parts.device

    @property
    def dtype(self) -> torch.dtype:
        return self._parts.dtype

    @property
    def max_num_seqs(self) -> int:
        """Largest number of running requests."""
        return self._parts.max_num_seqs

    @property
    def max_model_len(self) -> int:
        """Largest number of tokens of prompt and completion."""
        return self._parts.max_model_len

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens that the engine was built for; 0 in a plain engine."""
        return self._scheduler.max_draft_tokens

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens of prompt and completion, over all requests, that the KV cache has room for."""
        return self._parts.kv_cache_tokens

    # ---- stepping --------------------------------------------------------------------------------------------------

    @property
    def choose(self) -> Callable[[int], Strategy]:
        """
        Strategy for a number of running requests, asked for once in every step while its batch is being scheduled.
        The engine applies all of it: draft length, lookup or drafter, and how the drafter samples.
        """
        return self._scheduler.choose

    @choose.setter
    def choose(self, choose: Callable[[int], Strategy]) -> None:
        self._scheduler.choose = choose

    @property
    def on_request(self) -> Callable[["SamplingParams"], None]:
        """Told of the sampling parameters of every request that comes, whoever has made it."""
        return self._scheduler.on_request

    @on_request.setter
    def on_request(self, on_request: Callable[["SamplingParams"], None]) -> None:
        self._scheduler.on_request = on_request

    def _look_up(self, request_id, prompt, answer, num_draft_tokens) -> list[int]:
        return self.lookup.propose(request_id, prompt, answer, num_draft_tokens)

    def _is_exact(self, params: "SamplingParams") -> bool:
        name = inexact_parameter(params, self.repeats_seeds)
        if name is not None and name not in self._warned_of:
            self._warned_of.add(name)
            logger.warning(
                "A request sets `%s`, which is not exact under speculation: steps in which such a request runs are "
                "plain decoding. %s",
                name,
                remedy_for(name),
            )
        return name is None

    def has_unfinished_requests(self) -> bool:
        return self._parts.has_unfinished_requests()

    def step(self) -> tuple[list["RequestOutput"], EngineStep | None]:
        """
        Runs one engine step.

        Returns:
            `tuple[list[RequestOutput], EngineStep | None]`: The request outputs of the step and what it did; `None`
            when nothing ran (an asynchronous scheduler returns its first output one step later).
        """
        started = time.perf_counter()
        outputs = self._parts.llm_engine.step()
        return outputs, self._scheduler.pop_step(time.perf_counter() - started)

    def abort_unfinished(self) -> None:
        """
        Drops all unfinished requests. After an exception in the middle of a rollout they would be the first outputs of
        the next one, and hold keys and values of old weights in the cache.
        """
        self._parts.abort_all()
        self._scheduler.reset()

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
        if self.proposer is not None:
            self.proposer.discard()

    def shutdown(self) -> None:
        """
        Ends the engine; neither it nor its `vllm.LLM` can be used afterwards. Its memory comes back when the last
        references to both are gone and the garbage collector has run, for they refer to each other; until here vLLM
        hides from the collector what it has built.
        """
        self._parts.shutdown()

    # ---- weights ---------------------------------------------------------------------------------------------------

    def push_policy(self, weights: Iterable[tuple[str, torch.Tensor]], verify: bool = True) -> None:
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
        self.weights.push_policy(weights, verify)

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

        Raises:
            [`WeightMismatchError`]: If a weight in the engine differs from the one pushed.
            `ValueError`: If an embedding is among the weights.
        """
        self.weights.push_drafter(weights, verify)

    # ---- the canary's questions ------------------------------------------------------------------------------------

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
        return probes.rejection_sample(self._parts, logits, draft_token_ids, draft_probs, temperature, top_p, top_k)

    def speculative_and_plain_logprobs(
        self, prompt_token_ids: list[int], num_samples: int = 4, num_tokens: int = 24
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Samples with as many draft tokens as possible, then scores the same tokens in a plain pass.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Log-probs from the speculative rollout and from the plain pass, both
            of shape (tokens,).
        """
        logprobs = probes.speculative_and_plain_logprobs(
            self.llm, self._parts, self._scheduler, prompt_token_ids, num_samples, num_tokens
        )
        self.reset_prefix_cache()
        return logprobs
