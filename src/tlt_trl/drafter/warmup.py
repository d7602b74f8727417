"""
Making a first drafter for a policy: answers sampled from the policy, its hidden states over them, some training.

A drafter that starts from the policy's weights alone accepts next to nothing; some ten thousand tokens of the policy's
own answers are enough for it to pay. Papers: EAGLE-3 (arXiv 2503.01840), TLT (arXiv 2511.16665, section on warm-up).
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from .drafter_trainer import DrafterTrainer
from .feature_buffer import FeatureBuffer, FeatureSample
from .features import FeatureRecorder
from .modeling_drafter import Drafter
from .vocabulary import most_frequent_token_ids


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
    batches, batch = [], []
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


def warm_up_drafter(
    policy: torch.nn.Module,
    sequences: Sequence[tuple[list[int], list[int]]],
    *,
    drafter: Drafter | None = None,
    draft_vocab_size: int | None = None,
    always_drafted: Sequence[int] = (),
    aux_hidden_state_layer_ids: Sequence[int] | None = None,
    epochs: float = 4.0,
    max_seconds: float = float("inf"),
    held_out_fraction: float = 0.05,
    learning_rate: float = 1e-3,
    unroll_steps: int = 5,
    max_tokens_per_step: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
    report: Callable[[dict[str, float]], None] | None = None,
) -> tuple[Drafter, dict[str, float]]:
    """
    Trains a drafter on answers that the policy gave.

    Args:
        policy (`torch.nn.Module`):
            The policy, a transformers causal language model.
        sequences (`Sequence[tuple[list[int], list[int]]]`):
            Prompt and completion token ids, sampled from the policy.
        drafter ([`Drafter`], *optional*):
            Drafter to go on with. If not set, one is initialised from the policy.
        draft_vocab_size (`int`, *optional*):
            Size of the reduced vocabulary, the most frequent tokens of `sequences`. `None` keeps the whole one.
        always_drafted (`Sequence[int]`, *optional*, defaults to `()`):
            Token ids that the reduced vocabulary must hold, for example the end of the sequence.
        aux_hidden_state_layer_ids (`Sequence[int]`, *optional*):
            Policy layers that the drafter reads.
        epochs (`float`, *optional*, defaults to `4.0`):
            Passes over the answers.
        max_seconds (`float`, *optional*, defaults to no limit):
            Stop after that much training time.
        held_out_fraction (`float`, *optional*, defaults to `0.05`):
            Share of the answers that is kept for the evaluation.
        learning_rate, unroll_steps, max_tokens_per_step, temperature, seed:
            As in [`DrafterTrainer`].
        report (`Callable[[dict[str, float]], None]`, *optional*):
            Called with the metrics of every optimiser step.

    Returns:
        `tuple[Drafter, dict[str, float]]`: The drafter and its metrics on the answers held out.
    """
    if not sequences:
        raise ValueError("No answers to warm the drafter up with; sample some from the policy first.")
    if drafter is None:
        ids = _draft_token_ids(sequences, policy.config.vocab_size, draft_vocab_size, always_drafted)
        drafter = Drafter.from_policy(policy, ids, aux_hidden_state_layer_ids)
    samples = record_features(policy, sequences, drafter.config.eagle_aux_hidden_state_layer_ids)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    num_held_out = max(1, round(held_out_fraction * len(samples)))
    held_out = [samples[i] for i in order[:num_held_out]]
    kept = [samples[i] for i in order[num_held_out:]] or held_out
    buffer = FeatureBuffer(max_tokens=sum(sample.num_tokens for sample in kept))
    for sample in kept:
        buffer.add(sample)
    trainer = DrafterTrainer(
        drafter,
        buffer,
        learning_rate=learning_rate,
        unroll_steps=unroll_steps,
        max_tokens_per_step=max_tokens_per_step,
        temperature=temperature,
        seed=seed,
    )
    trainer.set_target(policy.get_input_embeddings().weight, policy.get_output_embeddings().weight)
    _train(trainer, round(epochs * buffer.num_tokens), max_seconds, report)
    return drafter, trainer.evaluate(held_out) | {"tokens_trained": float(trainer.tokens_trained)}


def _train(trainer: DrafterTrainer, num_tokens: int, max_seconds: float, report) -> None:
    started = time.perf_counter()
    with tqdm(total=num_tokens, desc="drafter training", unit="tok", unit_scale=True) as bar:
        while trainer.tokens_trained < num_tokens and time.perf_counter() - started < max_seconds:
            metrics = trainer.step()
            if metrics is None:
                raise ValueError("No answer is long enough to learn from: a drafter needs at least three tokens.")
            if "loss" not in metrics:
                raise FloatingPointError("The drafter's loss is not finite; lower the learning rate.")
            bar.update(min(num_tokens, trainer.tokens_trained) - bar.n)
            bar.set_postfix(acceptance_length=f"{metrics.get('acceptance_length', 1.0):.2f}")
            if report is not None:
                report(metrics)


def _draft_token_ids(sequences, vocab_size: int, size: int | None, always: Sequence[int]) -> Tensor | None:
    if size is None:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for prompt, completion in sequences:
        counts += torch.bincount(torch.tensor(prompt + completion), minlength=vocab_size)
    return most_frequent_token_ids(counts, size, always)
