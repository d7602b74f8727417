"""
Making a first drafter for a policy: answers sampled from the policy, its hidden states over them, some training.

A drafter that starts from the policy's weights alone accepts next to nothing; some ten thousand tokens of the policy's
own answers are enough for it to pay. Papers: EAGLE-3 (arXiv 2503.01840), TLT (arXiv 2511.16665, section on warm-up).
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from .drafter_trainer import DrafterTrainer, DrafterTrainingArguments
from .feature_buffer import FeatureBuffer, FeatureSample
from .features import FeatureRecorder
from .modeling_drafter import Drafter
from .training_report import StepOutcome
from .vocabulary import most_frequent_token_ids


# A warm-up sees its data several times in many small steps; while a run goes on, the policy moves and steps are few.
PRETRAINING_ARGUMENTS = DrafterTrainingArguments(learning_rate=1e-3, max_tokens_per_step=256)


def record_features(
    policy: torch.nn.Module,
    sequences: Sequence[tuple[list[int], list[int]]],
    aux_hidden_state_layer_ids: Sequence[int],
    max_tokens_per_batch: int = 4096,
) -> list[FeatureSample]:
    """
    Runs the policy over finished samples and keeps its hidden states.

    Args:
        policy (`torch.nn.Module`):
            The policy, a transformers causal language model.
        sequences (`Sequence[tuple[list[int], list[int]]]`):
            Prompt and completion token ids.
        aux_hidden_state_layer_ids (`Sequence[int]`):
            Policy layers that the drafter reads.
        max_tokens_per_batch (`int`, *optional*, defaults to `4096`):
            Tokens of one forward pass, padding included.

    Returns:
        `list[FeatureSample]`: In CPU memory, one for each sequence with something to learn from.
    """
    num_tokens = sum(len(prompt) + len(completion) for prompt, completion in sequences)
    buffer = FeatureBuffer(max_tokens=max(1, num_tokens))
    recorder = FeatureRecorder(policy, aux_hidden_state_layer_ids, buffer)
    decoder = policy.get_decoder()
    # Sorted by length, a batch has little padding.
    batches = _batches_by_length(sequences, max_tokens_per_batch)
    try:
        for batch in tqdm(batches, desc="policy forward", unit="batch"):
            input_ids, attention_mask, prompt_length = _pad(batch, policy.device)
            with torch.no_grad(), recorder.recording(input_ids, attention_mask, prompt_length, step=0):
                decoder(input_ids=input_ids, attention_mask=attention_mask)
    finally:
        recorder.remove()
    return buffer.samples


def _batches_by_length(sequences, max_tokens: int) -> list[list[tuple[list[int], list[int]]]]:
    batches: list[list[tuple[list[int], list[int]]]] = []
    batch: list[tuple[list[int], list[int]]] = []
    for sequence in sorted(sequences, key=lambda pair: len(pair[0]) + len(pair[1])):
        width = len(sequence[0]) + len(sequence[1])
        if batch and width * (len(batch) + 1) > max_tokens:
            batches.append(batch)
            batch = []
        batch.append(sequence)
    return [*batches, batch] if batch else batches


def _pad(batch, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Left-padded prompts and right-padded completions, as TRL lays its batches out."""
    prompt_length = max(len(prompt) for prompt, _ in batch)
    width = prompt_length + max(len(completion) for _, completion in batch)
    input_ids = torch.zeros(len(batch), width, dtype=torch.long)
    attention_mask = torch.zeros(len(batch), width, dtype=torch.long)
    for row, (prompt, completion) in enumerate(batch):
        start, tokens = prompt_length - len(prompt), prompt + completion
        input_ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        attention_mask[row, start : start + len(tokens)] = 1
    return input_ids.to(device), attention_mask.to(device), prompt_length


class DrafterWarmup:
    """
    Trains a drafter on answers that the policy gave, which may come in several rounds.

    Args:
        policy (`torch.nn.Module`):
            The policy, a transformers causal language model.
        drafter ([`Drafter`]):
            Drafter to train.
        held_out_fraction (`float`, *optional*, defaults to `0.05`):
            Share of the answers that is kept for the evaluation.
        args ([`DrafterTrainingArguments`], *optional*, defaults to [`PRETRAINING_ARGUMENTS`]):
            How to train.
    """

    def __init__(
        self,
        policy: torch.nn.Module,
        drafter: Drafter,
        *,
        held_out_fraction: float = 0.05,
        args: DrafterTrainingArguments = PRETRAINING_ARGUMENTS,
    ):
        self.policy = policy
        self.held_out_fraction = held_out_fraction
        self.held_out: list[FeatureSample] = []
        self.trained_s = 0.0
        self._num_added = 0
        self._generator = torch.Generator().manual_seed(args.seed)
        # Nothing is dropped: the capacity grows with what is added.
        self.buffer = FeatureBuffer(max_tokens=1)
        self.trainer = DrafterTrainer(drafter, self.buffer, args)
        self.trainer.set_policy(policy.get_input_embeddings().weight, policy.get_output_embeddings().weight)

    def add(self, sequences: Sequence[tuple[list[int], list[int]]]) -> None:
        """
        Runs the policy over answers, keeps what the drafter learns from, and sets a share aside for the evaluation.

        Args:
            sequences (`Sequence[tuple[list[int], list[int]]]`):
                Prompt and completion token ids, sampled from the policy.
        """
        if not sequences:
            raise ValueError("No answers to warm the drafter up with; sample some from the policy first.")
        layer_ids = self.trainer.drafter.config.eagle_aux_hidden_state_layer_ids
        samples = record_features(self.policy, sequences, layer_ids)
        self._num_added += len(samples)
        num_held_out = max(1, round(self.held_out_fraction * self._num_added)) - len(self.held_out)
        order = torch.randperm(len(samples), generator=self._generator).tolist()
        held_out = [samples[i] for i in order[:num_held_out]]
        kept = [samples[i] for i in order[num_held_out:]]
        self.held_out += held_out
        # Where there is a single answer it is both.
        for sample in kept if kept or self.buffer.samples else held_out:
            self.buffer.max_tokens += sample.num_tokens
            self.buffer.add(sample)

    def train(self, epochs: float, max_s: float = float("inf"), decay: bool = False) -> None:
        """
        Trains until the drafter has seen what was added `epochs` times on average, counted from the beginning.

        Args:
            epochs (`float`):
                Passes over the answers.
            max_s (`float`, *optional*, defaults to no limit):
                Training time at most, in seconds, also counted from the beginning.
            decay (`bool`, *optional*, defaults to `False`):
                Whether the learning rate falls linearly to zero over this call, which must then be the last one.
        """
        num_tokens, trainer = round(epochs * self.buffer.num_tokens), self.trainer
        peak, first_token, first_s = trainer.learning_rate, trainer.tokens_trained, self.trained_s
        began = time.perf_counter() - self.trained_s
        with tqdm(
            total=num_tokens,
            initial=min(num_tokens, trainer.tokens_trained),
            desc="drafter training",
            unit="tok",
            unit_scale=True,
        ) as bar:
            while trainer.tokens_trained < num_tokens and self.trained_s < max_s:
                if decay:
                    done = (trainer.tokens_trained - first_token) / (num_tokens - first_token)
                    done = max(done, (self.trained_s - first_s) / (max_s - first_s))
                    trainer.learning_rate = peak * (1.0 - done)
                result = trainer.step()
                if result.outcome is StepOutcome.STARVED:
                    raise ValueError("No answer is long enough to learn from: a drafter needs at least three tokens.")
                if not result.has_trained:
                    raise FloatingPointError("The drafter's loss is not finite; lower the learning rate.")
                bar.update(min(num_tokens, trainer.tokens_trained) - bar.n)
                bar.set_postfix(acceptance_length=f"{result.metrics['acceptance_length']:.2f}")
                self.trained_s = time.perf_counter() - began

    def evaluate(self) -> dict[str, float]:
        """Metrics of the drafter on the answers held out."""
        return self.trainer.evaluate(self.held_out) | {"tokens_trained": float(self.trainer.tokens_trained)}


def draft_token_ids_for(
    sequences: Sequence[tuple[list[int], list[int]]], vocab_size: int, size: int | None, always: Sequence[int] = ()
) -> Tensor | None:
    """
    Reduced vocabulary of a drafter.

    Args:
        sequences (`Sequence[tuple[list[int], list[int]]]`):
            Prompt and completion token ids.
        vocab_size (`int`):
            Size of the policy's vocabulary.
        size (`int`, *optional*):
            Size of the reduced one. `None` keeps the whole vocabulary.
        always (`Sequence[int]`, *optional*, defaults to `()`):
            Token ids that it must hold, for example the end of the sequence.

    Returns:
        `torch.LongTensor` of shape (size,) or `None`: sorted token ids, the most frequent ones.
    """
    if size is None:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for prompt, completion in sequences:
        counts += torch.bincount(torch.tensor(prompt + completion), minlength=vocab_size)
    return most_frequent_token_ids(counts, size, always)
