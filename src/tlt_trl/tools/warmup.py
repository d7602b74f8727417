"""
`tlt-trl warmup`: a first drafter from a policy's own answers, which speeds their sampling up as soon as it can.

Answers are sampled in rounds. The first runs without a drafter, with draft tokens from earlier text where they pay;
after each round the drafter is trained on as many tokens as the round added, drawn from all answers so far, and pushed
to the engine, where the selector decides whether it pays already. The remaining passes follow when all answers are
there.
"""

import argparse
import gc
import json
import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..drafter.checkpoint import run_facts
from ..drafter.drafter_trainer import DrafterTrainingArguments
from ..drafter.hub import write_model_card
from ..drafter.modeling_drafter import Drafter
from ..drafter.pretraining import PRETRAINING_ARGUMENTS, DrafterWarmup, draft_token_ids_for
from ..drafter.vocabulary import default_draft_vocab_size
from ..generation.engine import RolloutEngine
from ..generation.policy_checks import why_type_is_unsupported
from ..generation.rollout_loop import RolloutLoop
from ..generation.standalone import build_llm, completion_ids
from ..strategy import Strategy, make_selector
from ..vllm_internals.contract import UnsupportedEngineError
from .prompts import prompt_format_of, read_dataset_prompts, read_prompts


if TYPE_CHECKING:
    from vllm import LLM


logger = logging.getLogger(__name__)

NGRAM_DRAFT_LENGTH = 4
DRAFT_LENGTHS = (1, 2, 3, 5)

# Sampling ends within that share of the tokens asked for: what is missing then would be a few answers running alone.
SLACK = 0.05


def warm_up(
    model: str,
    prompts: list[list[int]],
    output_dir: Path,
    *,
    num_tokens: int = 80_000,
    max_completion_length: int = 256,
    max_num_seqs: int = 64,
    draft_vocab_size: int | None = None,
    always_drafted: Sequence[int] = (),
    epochs: float = 6.0,
    max_s: float = float("inf"),
    args: DrafterTrainingArguments = PRETRAINING_ARGUMENTS,
) -> dict[str, float]:
    """
    Samples answers, trains a drafter on them and saves it.

    Args:
        model (`str`):
            Folder or Hub id of the policy.
        prompts (`list[list[int]]`):
            Prompt token ids; they are gone through again and again.
        output_dir (`Path`):
            Folder for the drafter.
        num_tokens (`int`, *optional*, defaults to `80000`):
            Tokens of answers to sample, about.
        max_completion_length (`int`, *optional*, defaults to `256`):
            Tokens per answer at most.
        max_num_seqs (`int`, *optional*, defaults to `64`):
            Requests sampled at once.
        draft_vocab_size (`int`, *optional*):
            Size of the draft vocabulary, the most frequent tokens of the first round. `None` means
            [`~tlt_trl.drafter.vocabulary.default_draft_vocab_size`].
        always_drafted (`Sequence[int]`, *optional*, defaults to `()`):
            Token ids that a reduced vocabulary must hold, for example the end of the sequence.
        epochs (`float`, *optional*, defaults to `6.0`):
            Passes over the answers.
        max_s (`float`, *optional*, defaults to no limit):
            Training time at most, in seconds.
        args ([`~tlt_trl.drafter.DrafterTrainingArguments`], *optional*):
            How to train. Answers are sampled at its temperature and with its seed too.

    Returns:
        `dict[str, float]`: Metrics of the drafter on the answers held out, `sampled_tokens_per_s`, and
        `sampling_drafter_share`, the share of the engine's steps that the drafter drafted in.

    Raises:
        [`~tlt_trl.vllm_internals.contract.UnsupportedEngineError`]: If vLLM cannot draft for a policy of this type.
    """
    prompts = _prompts_that_fit(prompts, _check_policy(model) - max_completion_length)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    policy.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    if draft_vocab_size is None:
        draft_vocab_size = default_draft_vocab_size(policy.config.vocab_size)
    max_model_len = max(map(len, prompts)) + max_completion_length
    sampler = AnswerSampler(
        _build_engine(model, policy, draft_vocab_size, max_num_seqs, max_model_len, args.seed),
        prompts,
        num_tokens,
        unroll_steps=args.unroll_steps,
        seed=args.seed,
        temperature=args.temperature,
        max_tokens=max_completion_length,
    )
    sequences = sampler.sample_round()
    ids = draft_token_ids_for(sequences, policy.config.vocab_size, draft_vocab_size, always_drafted)
    drafter = Drafter.from_policy(policy, ids).to(policy.device)
    warmup = DrafterWarmup(policy, drafter, args=args)
    warmup.add(sequences)
    while not sampler.is_done:
        warmup.train(min(1.0, epochs), max_s)
        sampler.use(drafter)
        warmup.add(sampler.sample_round())
    figures = sampler.close()
    del sampler
    gc.collect()  # the engine's memory is the drafter's from here on
    # On answers held out the decay was worth 0.1 of acceptance length, in one comparison on the same answers.
    warmup.train(epochs, max_s, decay=True)
    metrics = warmup.evaluate()
    _save(drafter, output_dir, policy, metrics, args.unroll_steps)
    return metrics | figures


def run(args: argparse.Namespace) -> int:
    """`tlt-trl warmup`."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompt_format = prompt_format_of(args)
    if args.prompts is not None:
        prompts = read_prompts(args.prompts, tokenizer, prompt_format)
    else:
        prompts = read_dataset_prompts(args.dataset, args.dataset_split, args.prompt_column, tokenizer, prompt_format)
    metrics = warm_up(
        args.model,
        prompts,
        args.output,
        num_tokens=args.tokens,
        max_completion_length=args.max_completion_length,
        max_num_seqs=args.max_num_seqs,
        draft_vocab_size=args.draft_vocab_size,
        always_drafted=[tokenizer.eos_token_id],
        epochs=args.epochs,
        max_s=args.max_s,
        args=replace(
            PRETRAINING_ARGUMENTS,
            learning_rate=args.learning_rate,
            unroll_steps=args.unroll_steps,
            max_tokens_per_step=args.max_tokens_per_step,
            temperature=args.temperature,
            seed=args.seed,
        ),
    )
    print(json.dumps({"output": str(args.output), **{name: round(value, 4) for name, value in metrics.items()}}))
    return 0


def _check_policy(model: str) -> int:
    """Tokens that fit into the policy's context, of a policy that vLLM can draft for."""
    config = AutoConfig.from_pretrained(model)
    reason = why_type_is_unsupported(config, config.architectures or [])
    if reason is not None:
        raise UnsupportedEngineError(reason)
    return config.get_text_config().max_position_embeddings


def _build_engine(
    model: str, policy: PreTrainedModel, draft_vocab_size: int, max_num_seqs: int, max_model_len: int, seed: int
) -> "LLM":
    """An engine whose drafter has its shape already; which tokens it drafts is known after the first round."""
    draft_token_ids = torch.arange(draft_vocab_size)
    with tempfile.TemporaryDirectory(prefix="tlt-trl-drafter-") as folder:
        Drafter.from_policy(policy, draft_token_ids).save_pretrained(folder)
        return build_llm(
            model,
            drafter=folder,
            max_draft_tokens=max(*DRAFT_LENGTHS, NGRAM_DRAFT_LENGTH),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            seed=seed,
        )


def _save(
    drafter: Drafter, output_dir: Path, policy: PreTrainedModel, metrics: dict[str, float], unroll_steps: int
) -> None:
    """Saves the drafter with its provenance and a model card."""
    # Some are missing when no answer held out is long enough.
    positions = [f"acceptance_{step}" for step in range(1, unroll_steps + 1)]
    provenance = run_facts() | {
        "policy": policy.name_or_path,
        "policy_revision": policy.config._commit_hash,
        "tokens_trained": int(metrics["tokens_trained"]),
        "acceptance_length": metrics.get("acceptance_length"),
        "acceptance_by_position": [metrics[name] for name in positions if name in metrics],
        "held_out": metrics,
    }
    drafter.save_pretrained(output_dir, provenance=provenance)
    write_model_card(output_dir, str(output_dir), drafter.config, provenance)


def _prompts_that_fit(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    fitting = [prompt for prompt in prompts if len(prompt) <= max_tokens]
    if not fitting:
        raise ValueError(
            f"No prompt fits: at most {max_tokens} tokens are left for it in the policy's context beside the answer. "
            "Lower `max_completion_length`."
        )
    if len(fitting) < len(prompts):
        logger.warning(
            "%d of %d prompts are left out: they have more than the %d tokens that the policy's context leaves beside "
            "the answer.",
            len(prompts) - len(fitting),
            len(prompts),
            max_tokens,
        )
    return fitting


class AnswerSampler:
    """
    Samples answers round after round, over and over the prompts, until there are about `num_tokens` tokens of them.

    Args:
        llm (`vllm.LLM`):
            Engine with a drafter.
        prompts (`list[list[int]]`):
            Prompt token ids.
        num_tokens (`int`):
            Tokens of answers wanted.
        unroll_steps (`int`):
            Draft steps that the drafter is trained for; it is not asked for more.
        seed (`int`):
            Seed of the selector.
        **sampling:
            Arguments of `vllm.SamplingParams`.
    """

    def __init__(
        self, llm: "LLM", prompts: list[list[int]], num_tokens: int, *, unroll_steps: int, seed: int, **sampling
    ):
        self.llm, self.prompts, self.num_tokens, self.sampling = llm, prompts, num_tokens, sampling
        self.num_sampled_answers = self.num_sampled_tokens = 0
        self.sampling_s = 0.0
        self._engine = RolloutEngine(llm)
        self._bar = tqdm(total=num_tokens, desc="sampling answers", unit="tok", unit_scale=True)
        lookups = [Strategy("ngram", NGRAM_DRAFT_LENGTH)] if self._engine.can_look_up else []
        drafts = [Strategy("eagle3", length) for length in DRAFT_LENGTHS if length <= unroll_steps]

        def loop(strategies: list[Strategy]) -> RolloutLoop:
            selector = make_selector("auto", strategies, self._engine.max_num_seqs, seed=seed)
            return RolloutLoop(self._engine, selector)

        # Before it has been trained the drafter accepts next to nothing: not worth a trial.
        llm.rollout_loop = self._loop_without_drafter = loop(lookups or [Strategy.off()])
        self._loop_with_drafter = loop(drafts + lookups)
        self._loop_with_drafter.lookup = self._loop_without_drafter.lookup

    @property
    def is_done(self) -> bool:
        return self.num_sampled_tokens >= (1 - SLACK) * self.num_tokens

    def use(self, drafter: Drafter) -> None:
        """From now on the drafter, with the weights that it has now, is among the choices."""
        self._engine.push_drafter(drafter.vllm_weights())
        self._engine.reset_prefix_cache()
        self.llm.rollout_loop = self._loop_with_drafter

    def sample_round(self) -> list[tuple[list[int], list[int]]]:
        """
        Returns:
            `list[tuple[list[int], list[int]]]`: Prompt and completion token ids.
        """
        first, num = self.num_sampled_answers, self._num_wanted()
        prompts = [self.prompts[i % len(self.prompts)] for i in range(first, first + num)]
        began = time.perf_counter()
        answers = completion_ids(self.llm, prompts, detokenize=False, **self.sampling)
        self.sampling_s += time.perf_counter() - began
        self.num_sampled_answers += num
        self.num_sampled_tokens += sum(map(len, answers))
        self._bar.update(min(self.num_tokens, self.num_sampled_tokens) - self._bar.n)
        return list(zip(prompts, answers, strict=True))

    def _num_wanted(self) -> int:
        """
        Answers of the next round. The first, which tells how long answers are, fills the engine once; later ones are
        several times that, so that their tails do not run alone, and no more than what is still missing.
        """
        running = self._engine.max_num_seqs
        if not self.num_sampled_answers:
            return running
        mean_length = self.num_sampled_tokens / self.num_sampled_answers
        return min(4 * running, math.ceil((self.num_tokens - self.num_sampled_tokens) / mean_length))

    def close(self) -> dict[str, float]:
        """
        Ends the engine.

        Returns:
            `dict[str, float]`: `sampled_tokens_per_s` and `sampling_drafter_share`.
        """
        self._bar.close()
        self._engine.shutdown()
        steps = self._loop_with_drafter.ledger.steps_by_strategy()
        num_steps = self._loop_without_drafter.stats.steps + self._loop_with_drafter.stats.steps
        drafted = sum(count for name, count in steps.items() if name.startswith("eagle3"))
        return {
            "sampled_tokens_per_s": self.num_sampled_tokens / self.sampling_s,
            "sampling_drafter_share": drafted / num_steps,
        }
