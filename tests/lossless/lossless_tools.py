"""A predictable policy with a trained drafter, an engine around them, and exact statistics of what it samples."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tlt_trl.drafter import Drafter, DrafterTrainer, DrafterTrainingArguments, FeatureBuffer, FeatureRecorder
from tlt_trl.generation.canary import chi_square_p_value, exact_probabilities
from tlt_trl.generation.engine import RolloutEngine
from tlt_trl.generation.standalone import build_llm
from tlt_trl.strategy import Strategy


VOCAB_SIZE = 32
MAX_DRAFT_TOKENS = 5
# Of one test. There are about a hundred, all with fixed seeds; real faults give 1e-20 and less.
SIGNIFICANCE = 1e-6
# Engine and Hugging Face model add float32 numbers in different orders; a filter may then fall on either side.
TIE = 1e-4


def save_predictable_policy(save_tiny_policy, directory: str, seed: int = 3, tied: bool = False) -> PreTrainedModel:
    """
    A random policy that prefers three tokens whatever the context, so that a drafter learns it within seconds.

    The rest of its distribution depends on the context: attending to the wrong tokens shows in the statistics.
    """
    save_tiny_policy(directory, vocab_size=VOCAB_SIZE, spread=0.2, seed=seed, tied=tied)
    policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        policy.get_input_embeddings().weight.add_(
            2.0 * torch.nn.functional.normalize(torch.randn(64, generator=generator), dim=0)
        )
        ids = torch.randint(4, VOCAB_SIZE, (64, 16), generator=generator)
        mean_state = policy.model(ids).last_hidden_state.mean((0, 1))
        preference = torch.zeros(VOCAB_SIZE)
        preference[[5, 11, 20]] = torch.tensor([4.0, 3.3, 2.5])
        policy.get_output_embeddings().weight.add_(preference[:, None] * mean_state / mean_state.square().sum())
    policy.save_pretrained(directory)
    return policy


def trained_drafter(policy: PreTrainedModel, num_steps: int = 30, draft_token_ids: Tensor | None = None) -> Drafter:
    """A drafter after a few optimiser steps on the policy's own samples."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        prompts = torch.randint(4, VOCAB_SIZE, (64, 4))
        ids = policy.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=44,
            min_new_tokens=44,
            do_sample=True,
            top_k=0,
            pad_token_id=3,
        )
    drafter = Drafter.from_policy(policy, draft_token_ids)
    buffer = FeatureBuffer(max_tokens=100_000)
    recorder = FeatureRecorder(policy, drafter.config.eagle_aux_hidden_state_layer_ids, buffer)
    with torch.no_grad(), recorder.recording(ids, torch.ones_like(ids), 4, 0):
        policy(ids)
    recorder.remove()
    args = DrafterTrainingArguments(learning_rate=3e-3, max_tokens_per_step=512, autocast_dtype=torch.float32)
    trainer = DrafterTrainer(drafter, buffer, args)
    trainer.set_policy(policy.get_input_embeddings().weight, policy.get_output_embeddings().weight)
    for _ in range(num_steps):
        trainer.step()
    return drafter


@dataclass
class Rollout:
    """Finished requests of one rollout, in order, and what became of the drafts."""

    outputs: list = field(default_factory=list)
    drafts: int = 0
    accepted_by_position: Tensor = field(default_factory=lambda: torch.zeros(16))

    @property
    def token_ids(self) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in self.outputs]

    @property
    def first_acceptance(self) -> float:
        """Share of drafts whose first token was accepted."""
        return (self.accepted_by_position[0] / max(1, self.drafts)).item()


class EngineUnderTest:
    """One float32 engine with a policy and a drafter, whose number of draft tokens a test sets per rollout."""

    def __init__(
        self,
        policy: PreTrainedModel,
        policy_dir: str,
        drafter: Drafter,
        drafter_dir: str,
        max_draft_tokens: int = MAX_DRAFT_TOKENS,
        **options,
    ):
        self.policy = policy
        drafter.save_pretrained(drafter_dir)
        defaults = {
            "max_num_seqs": 512,
            "max_model_len": 96,
            "kv_cache_memory_bytes": 2**27,  # the engines of all tests live until the process ends
            "dtype": "float32",
            "enforce_eager": True,
        }
        self.llm = build_llm(
            policy_dir, drafter=drafter_dir, max_draft_tokens=max_draft_tokens, **(defaults | options)
        )
        self.engine = RolloutEngine(self.llm)
        self.engine.repeats_seeds = True  # most tests play one strategy

    def rollout(
        self,
        prompts: list[list[int]],
        strategy: str | Callable[[int], Strategy],
        seed: int = 0,
        params_by_prompt: list[dict] | None = None,
        **params,
    ) -> Rollout:
        """Samples with a strategy, its name or a function of the batch size; "off" is a plain run."""
        from vllm import SamplingParams

        if isinstance(strategy, str):
            always = Strategy.parse(strategy)
            self.engine.choose = lambda batch_size: always
        else:
            self.engine.choose = strategy
        # The engine lives in this process and samples from its random state.
        torch.manual_seed(seed)
        defaults = {"detokenize": False, "ignore_eos": True} | params
        per_prompt = params_by_prompt or [{}] * len(prompts)
        self.llm.enqueue(
            [{"prompt_token_ids": ids} for ids in prompts],
            [SamplingParams(**(defaults | own)) for own in per_prompt],
            use_tqdm=False,
        )
        result = Rollout()
        while self.engine.has_unfinished_requests():
            outputs, step = self.engine.step()
            result.outputs += [output for output in outputs if output.finished]
            if step is not None:
                result.drafts += step.drafts
                for position, accepted in enumerate(step.accepted_by_position):
                    result.accepted_by_position[position] += accepted
        result.outputs.sort(key=lambda output: int(output.request_id))
        return result


@torch.no_grad()
def sequence_probabilities(policy: PreTrainedModel, prompt: list[int], length: int, **sampling) -> Tensor:
    """Probability of every completion of `length` tokens by enumeration, flattened, shape (vocab_size**length,)."""
    probabilities = torch.ones(1, dtype=torch.float64)
    for position in range(length):
        prefixes = [prompt + list(p) for p in itertools.product(range(VOCAB_SIZE), repeat=position)]
        logits = policy(torch.tensor(prefixes)).logits[:, -1]
        probabilities = (probabilities[:, None] * exact_probabilities(logits, **sampling)).flatten()
    return probabilities


def sequence_p_value(token_ids: list[list[int]], probabilities: Tensor) -> float:
    """Chi-square test of whole completions against their enumerated probabilities."""
    tokens = torch.tensor(token_ids)
    weights = VOCAB_SIZE ** torch.arange(tokens.shape[1] - 1, -1, -1)
    counts = torch.bincount((tokens * weights).sum(-1), minlength=len(probabilities))
    return chi_square_p_value(counts, probabilities)


@torch.no_grad()
def rollout_p_value(
    policy: PreTrainedModel,
    prompts: list[list[int]],
    token_ids: list[list[int]],
    adjust: Callable[[Tensor, Tensor, int], Tensor] = lambda logits, ids, prompt_length: logits,
    num_cells: int = 32,
    **sampling,
) -> float:
    """
    Chi-square test of every token of long completions against the policy's distribution in its own context.

    Every context has a distribution of its own, so tokens are mapped to numbers that are uniform under all of them
    (randomised probability integral transform, tokens in the order of their probability), and those are tested.

    Args:
        adjust (`Callable`, *optional*):
            Maps logits (batch, length, vocab), ids (batch, prompt + length) and the prompt's length to the logits that
            the sampling parameters make of them.
        **sampling:
            Arguments of `exact_probabilities`.
    """
    prompt_length = len(prompts[0])
    ids = torch.cat([torch.tensor(prompts), torch.tensor(token_ids)], dim=1)
    logits = policy(ids).logits[:, prompt_length - 1 : -1]
    logits = adjust(logits.double(), ids, prompt_length).flatten(0, 1)
    exact = exact_probabilities(logits, **sampling)
    clear = ~_falls_on_a_tie(logits, exact, **sampling)
    assert clear.double().mean() > 0.9
    exact, sampled = exact[clear], ids[:, prompt_length:].flatten()[clear]
    mine = exact.gather(-1, sampled[:, None])
    if (mine == 0).any():
        return 0.0
    # Stable order: of tokens that are equally likely, those before the sampled one count as more likely.
    order = exact.argsort(dim=-1, descending=True, stable=True)
    rank = (order == sampled[:, None]).long().argmax(-1, keepdim=True)
    before = exact.gather(-1, order).cumsum(-1).gather(-1, rank) - mine
    uniform = torch.rand(before.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cells = ((before + uniform * mine) * num_cells).long().clamp(0, num_cells - 1).flatten()
    return chi_square_p_value(torch.bincount(cells, minlength=num_cells), torch.full((num_cells,), 1 / num_cells))


def _falls_on_a_tie(logits: Tensor, exact: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Contexts in which rounding decides what a filter keeps; which ones does not depend on what was sampled."""
    tie = torch.zeros(len(logits), dtype=torch.bool)
    if top_k:
        best = logits.topk(top_k + 1, dim=-1).values
        tie |= best[:, -2] - best[:, -1] < TIE
    if top_p < 1.0:
        for shifted in (top_p - TIE, top_p + TIE):
            tie |= ((exact_probabilities(logits, temperature, shifted, top_k) > 0) != (exact > 0)).any(-1)
    return tie


def in_turn(*names: str) -> Callable[[int], Strategy]:
    """Strategies that change in every step, round and round."""
    turns = itertools.cycle([Strategy.parse(name) for name in names])
    return lambda batch_size: next(turns)


def eagle3(num_draft_tokens: int, draft_sampling: str = "greedy") -> str:
    """Name of a strategy of the drafter, "off" without draft tokens."""
    return str(Strategy("eagle3", num_draft_tokens, draft_sampling)) if num_draft_tokens else "off"
