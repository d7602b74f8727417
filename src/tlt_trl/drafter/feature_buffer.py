"""
Bounded store of hidden states of earlier steps: while step k's rollout runs, the drafter trains on steps up to k - 1.

Answers that finish early are short, so a buffer that forgot the previous step would starve the drafter of exactly the
long answers that it must speed up (TLT, arXiv 2511.16665).
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass
class FeatureSample:
    """
    One prompt with its answer, without padding, and the policy's states for it.

    Args:
        input_ids (`torch.Tensor` of shape (T,)):
            Token ids.
        aux_hidden_states (`torch.Tensor` of shape (T, num_aux * H)):
            Inputs of the auxiliary policy layers, side by side, bf16.
        last_hidden_state (`torch.Tensor` of shape (T, H)):
            Policy state after the final norm, the input of its `lm_head`, bf16.
        prompt_length (`int`):
            Tokens before the first answer token.
        step (`int`):
            Training step in which it was recorded.
    """

    input_ids: Tensor
    aux_hidden_states: Tensor
    last_hidden_state: Tensor
    prompt_length: int
    step: int

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def answer_length(self) -> int:
        return self.num_tokens - self.prompt_length

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.aux_hidden_states).all() and torch.isfinite(self.last_hidden_state).all())


@dataclass
class _Entry:
    sample: FeatureSample
    uses: int  # batches it was part of
    serial: int = field(compare=False)  # order of arrival, breaks ties


class FeatureBuffer:
    """
    Samples in CPU memory, bounded in tokens.

    A full buffer drops the oldest step first and, within a step, the shortest answers. Batches take the samples
    that were used least, so that all are seen equally often, and reserve a share for long answers of earlier steps.

    Args:
        max_tokens (`int`):
            Capacity in tokens. A token costs `2 * (num_aux + 1) * hidden_size` bytes.
        long_answer_fraction (`float`, *optional*, defaults to `0.5`):
            Share of every batch reserved for the longest quarter of the answers of earlier steps. More means a better
            drafter for the long tail and a worse one for the bulk.
        max_age (`int`, *optional*, defaults to `4`):
            Steps after which samples are dropped even when there is room. The states of an old policy teach the wrong
            distribution; few tokens teach nothing. Lower it when the learning rate is high.
    """

    def __init__(self, max_tokens: int, long_answer_fraction: float = 0.5, max_age: int = 4):
        if max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1.")
        if not 0.0 <= long_answer_fraction <= 1.0:
            raise ValueError(f"long_answer_fraction={long_answer_fraction} must be between 0 and 1.")
        if max_age < 1:
            raise ValueError(f"max_age={max_age} must be at least 1: the previous step is what a drafter trains on.")
        self.max_tokens = max_tokens
        self.long_answer_fraction = long_answer_fraction
        self.max_age = max_age
        self.current_step = 0
        self._is_new_run = False
        self.num_tokens = 0
        self.num_added = 0
        self.num_rejected = 0  # samples with infinities or NaN
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def samples(self) -> list[FeatureSample]:
        return [entry.sample for entry in self._entries]

    def add(self, sample: FeatureSample) -> bool:
        """Adds a sample and returns whether it was kept. It is not kept if it is not finite or does not fit."""
        if not sample.is_finite:
            self.num_rejected += 1
            return False
        if sample.num_tokens > self.max_tokens:
            return False
        # A newcomer joins the current round instead of being repeated until it has caught up with the old samples.
        uses = min((entry.uses for entry in self._entries), default=0)
        entry = _Entry(sample, uses, self.num_added)
        self.num_added += 1
        self._entries.append(entry)
        self.num_tokens += sample.num_tokens
        self._evict()
        return any(kept is entry for kept in self._entries)

    def start_run(self) -> None:
        """
        Begins another run, whose steps count anew. Its first step is the one after the last of the run before, as far
        as the age of what is there goes.
        """
        self._is_new_run = True

    def start_step(self, step: int) -> None:
        """Begins a training step: what is there now is the past, and what is too old goes."""
        if self._is_new_run:
            self._is_new_run = False
            for entry in self._entries:
                entry.sample = replace(entry.sample, step=entry.sample.step + step - 1 - self.current_step)
        self.current_step = step
        self._keep([entry for entry in self._entries if step - entry.sample.step <= self.max_age])

    def sample_batch(self, max_tokens: int, generator: torch.Generator) -> list[FeatureSample]:
        """
        Draw samples of at most `max_tokens` tokens together, without repeats.

        A sample longer than `max_tokens` is returned alone, and the caller must crop it. Small batches therefore see
        long answers in windows, one per batch, as often as other answers.
        """
        long_answers = self._long_answers()
        batch = self._draw(long_answers, int(self.long_answer_fraction * max_tokens), generator)
        if not batch and long_answers and torch.rand((), generator=generator) < self.long_answer_fraction:
            # None fits into its share of a small batch. Then a share of the batches starts with one.
            batch = self._least_used(long_answers, generator)[:1]
        taken = {entry.serial for entry in batch}
        used = sum(entry.sample.num_tokens for entry in batch)
        others = [entry for entry in self._entries if entry.serial not in taken]
        if not batch:
            others = self._least_used(others, generator)
            if others and others[0].sample.num_tokens > max_tokens:
                batch = others[:1]
                used = max_tokens
        batch += self._draw(others, max_tokens - used, generator) if used < max_tokens else []
        for entry in batch:
            entry.uses += 1
        return [entry.sample for entry in batch]

    def state_dict(self) -> dict[str, Any]:
        """
        Counters and content. Tensors are not copied: the buffer never changes them in place, so the state can be
        written to disk later.
        """
        entries = [{**vars(entry.sample), "uses": entry.uses, "serial": entry.serial} for entry in self._entries]
        return {
            "current_step": self.current_step,
            "num_added": self.num_added,
            "num_rejected": self.num_rejected,
            "entries": entries,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a saved state. If this buffer is smaller than the saved one, samples are dropped as usual."""
        self.current_step = state["current_step"]
        self._is_new_run = False
        self.num_added = state["num_added"]
        self.num_rejected = state["num_rejected"]
        names = [spec.name for spec in fields(FeatureSample)]
        self._keep(
            [
                _Entry(FeatureSample(**{name: entry[name] for name in names}), entry["uses"], entry["serial"])
                for entry in state["entries"]
            ]
        )
        self._evict()

    def _keep(self, entries: list[_Entry]) -> None:
        self._entries = entries
        self.num_tokens = sum(entry.sample.num_tokens for entry in entries)

    def _evict(self) -> None:
        while self.num_tokens > self.max_tokens:
            victim = min(
                self._entries, key=lambda entry: (entry.sample.step, entry.sample.answer_length, -entry.serial)
            )
            self._entries = [entry for entry in self._entries if entry is not victim]
            self.num_tokens -= victim.sample.num_tokens

    def _long_answers(self) -> list[_Entry]:
        """The quarter of the samples of earlier steps that has the longest answers."""
        earlier = [entry for entry in self._entries if entry.sample.step < self.current_step]
        earlier.sort(key=lambda entry: entry.sample.answer_length, reverse=True)
        return earlier[: (len(earlier) + 3) // 4]

    def _least_used(self, entries: list[_Entry], generator: torch.Generator) -> list[_Entry]:
        order = torch.randperm(len(entries), generator=generator).tolist()
        return sorted((entries[i] for i in order), key=lambda entry: entry.uses)

    def _draw(self, entries: list[_Entry], max_tokens: int, generator: torch.Generator) -> list[_Entry]:
        """Least used first, ties at random; samples that no longer fit are passed over."""
        drawn = []
        for entry in self._least_used(entries, generator):
            if entry.sample.num_tokens <= max_tokens:
                drawn.append(entry)
                max_tokens -= entry.sample.num_tokens
        return drawn
