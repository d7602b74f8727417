"""
`tlt-trl warmup`: a first drafter from a policy's own answers, which speeds their sampling up as soon as it can.

Answers are sampled in rounds. The first runs without a drafter, with draft tokens from earlier text where they pay;
after each round the drafter makes one pass over what there is and is pushed to the engine, where the selector decides
whether it pays already. The remaining passes follow when all answers are there.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqdm.auto import tqdm

from .drafter.checkpoint import run_facts, save_drafter
from .drafter.hub import write_model_card
from .drafter.modeling_drafter import Drafter
from .drafter.warmup import DrafterWarmup, draft_token_ids_for
from .generation.engine import RolloutEngine, UnsupportedEngineError, no_auxiliary_states_message, supports_eagle3
from .generation.rollout_loop import RolloutLoop
from .generation.standalone import build_llm, completion_ids
from .strategy import Strategy, make_selector


if TYPE_CHECKING:
    from vllm import LLM


NGRAM_DRAFT_TOKENS = 4
DRAFT_TOKEN_CHOICES = (1, 2, 3, 5)


def warm_up(prompts: list[list[int]], always_drafted: Sequence[int], args: argparse.Namespace) -> dict[str, float]:
    """
    Samples answers, trains a drafter on them and writes it to `args.output`.

    Args:
        prompts (`list[list[int]]`):
            Prompt token ids.
        always_drafted (`Sequence[int]`):
            Token ids that a reduced vocabulary must hold.
        args (`argparse.Namespace`):
            Options of the command.

    Returns:
        `dict[str, float]`: Metrics of the drafter on the answers held out, and how the answers were sampled.
    """
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    architectures = policy.config.architectures
    if not supports_eagle3(architectures):
        raise UnsupportedEngineError(no_auxiliary_states_message(architectures))
    policy.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def fresh_drafter(sequences) -> Drafter:
        ids = draft_token_ids_for(sequences, policy.config.vocab_size, args.draft_vocab_size, always_drafted)
        return Drafter.from_policy(policy, ids)

    # Gives the engine's drafter its shape; which tokens it drafts is known after the first round.
    llm = _build_engine(fresh_drafter([(prompt, []) for prompt in prompts]), prompts, args)
    sampler = AnswerSampler(llm, prompts, args)
    sequences = sampler.sample_round()
    drafter = fresh_drafter(sequences)
    warmup = DrafterWarmup(
        policy,
        drafter,
        learning_rate=args.learning_rate,
        unroll_steps=args.unroll_steps,
        max_tokens_per_step=args.max_tokens_per_step,
        temperature=args.temperature,
        seed=args.seed,
    )
    warmup.add(sequences)
    while sampler.num_tokens < args.tokens:
        warmup.train(epochs=min(1.0, args.epochs), max_seconds=args.max_seconds)
        sampler.use(drafter)
        warmup.add(sampler.sample_round())
    figures = sampler.figures()
    del llm, sampler  # gives the engine's memory back
    warmup.train(args.epochs, args.max_seconds)
    metrics = warmup.evaluate()
    _save(drafter, metrics, policy.config._commit_hash, args)
    return metrics | figures


def _build_engine(drafter: Drafter, prompts: list[list[int]], args: argparse.Namespace) -> "LLM":
    with tempfile.TemporaryDirectory(prefix="tlt-trl-drafter-") as folder:
        save_drafter(drafter, folder, provenance={})
        return build_llm(
            args.model,
            drafter=folder,
            max_draft_tokens=max(NGRAM_DRAFT_TOKENS, args.unroll_steps),
            max_num_seqs=args.max_num_seqs,
            max_model_len=max(map(len, prompts)) + args.max_completion_length,
            seed=args.seed,
        )


class AnswerSampler:
    """
    Samples answers round after round, over and over the prompts, until there are about `args.tokens` tokens of them.

    Args:
        llm (`vllm.LLM`):
            Engine with a drafter.
        prompts (`list[list[int]]`):
            Prompt token ids.
        args (`argparse.Namespace`):
            Options of the command.
    """

    def __init__(self, llm: "LLM", prompts: list[list[int]], args: argparse.Namespace):
        self.llm, self.prompts, self.args = llm, prompts, args
        self.num_answers = self.num_tokens = 0
        self.seconds = 0.0
        self._engine = RolloutEngine(llm)
        self._bar = tqdm(total=args.tokens, desc="sampling answers", unit="tok", unit_scale=True)
        lookups = [Strategy("ngram", NGRAM_DRAFT_TOKENS)] if self._engine.can_look_up else []
        drafts = [Strategy("eagle3", choice) for choice in DRAFT_TOKEN_CHOICES if choice <= args.unroll_steps]
        # Before it has been trained the drafter accepts next to nothing: not worth a trial.
        llm.rollout_loop = self._make_loop(lookups or [Strategy.off()])
        self._loop_with_drafter = self._make_loop(drafts + lookups)

    def _make_loop(self, strategies: list[Strategy]) -> RolloutLoop:
        return RolloutLoop(
            self._engine, make_selector("auto", strategies, self._engine.max_num_seqs, seed=self.args.seed)
        )

    def use(self, drafter: Drafter) -> None:
        """From now on the drafter, with the weights that it has now, is among the choices."""
        self._engine.push_drafter(drafter.vllm_weights())
        self._engine.reset_prefix_cache()
        self.llm.rollout_loop = self._loop_with_drafter

    def _num_wanted(self) -> int:
        """
        Answers of the next round. The first, which tells how long answers are, fills the engine once; later ones are
        several times that, so that their tails do not run alone, and no more than what is still missing.
        """
        running = self.args.max_num_seqs
        if not self.num_tokens:
            return running
        mean_length = self.num_tokens / self.num_answers
        return min(4 * running, math.ceil((self.args.tokens - self.num_tokens) / mean_length))

    def sample_round(self) -> list[tuple[list[int], list[int]]]:
        """
        Returns:
            `list[tuple[list[int], list[int]]]`: Prompt and completion token ids.
        """
        first, num = self.num_answers, self._num_wanted()
        prompts = [self.prompts[i % len(self.prompts)] for i in range(first, first + num)]
        began = time.perf_counter()
        answers = completion_ids(
            self.llm,
            prompts,
            temperature=self.args.temperature,
            max_tokens=self.args.max_completion_length,
            detokenize=False,
        )
        self.seconds += time.perf_counter() - began
        self.num_answers += num
        self.num_tokens += sum(map(len, answers))
        self._bar.update(min(self.args.tokens, self.num_tokens) - self._bar.n)
        return list(zip(prompts, answers, strict=True))

    def figures(self) -> dict[str, float]:
        """Tokens per second of all rounds, and the acceptance length of the steps that could use the drafter."""
        stats = self._loop_with_drafter.pop_stats()
        return {
            "sampled_tokens_per_s": self.num_tokens / self.seconds,
            "sampling_acceptance_length": stats.acceptance_length,
        }


def _save(drafter: Drafter, metrics: dict[str, float], policy_revision: str | None, args: argparse.Namespace) -> None:
    # Some are missing when no answer held out is long enough.
    positions = [f"acceptance_{step}" for step in range(1, args.unroll_steps + 1)]
    provenance = run_facts() | {
        "policy": args.model,
        "policy_revision": policy_revision,
        "tokens_trained": int(metrics["tokens_trained"]),
        "acceptance_length": metrics.get("acceptance_length"),
        "acceptance_by_position": [metrics[name] for name in positions if name in metrics],
        "held_out": metrics,
    }
    save_drafter(drafter, args.output, provenance)
    write_model_card(args.output, str(args.output), drafter.config, provenance)
