"""
Train the drafter one preemptible optimiser step at a time.

Everything here is the drafter's own: optimiser, gradient clip, random generator, copies of the policy's embedding and
head. A drafter loss under the policy's gradient-norm clip shrinks the policy's update about 20 times, and a draw from
the global random state makes the ranks of a tensor-parallel group sample different tokens.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .evaluation import evaluate_drafter
from .feature_buffer import FeatureBuffer, FeatureSample
from .losses import Teacher, simulated_acceptance_length, soft_cross_entropy
from .modeling_drafter import Drafter
from .packing import PackedBatch, crop, pack
from .training_report import StepOutcome, StepResult, TrainingReport
from .training_safety import GoodState, StepTimes
from .unroll import unroll


logger = logging.getLogger(__name__)

# Batches dropped one after the other that end a period of training: the cause is not in the batches.
MAX_DROPPED_IN_A_ROW = 3


@dataclass(frozen=True)
class DrafterTrainingArguments:
    """
    How a drafter is trained.

    Args:
        learning_rate (`float`, *optional*, defaults to `5e-4`):
            Constant after the warm-up: there is no end of training to decay towards.
        warmup_steps (`int`, *optional*, defaults to `10`):
            Optimiser steps of linear warm-up, over the whole life of the drafter.
        unroll_steps (`int`, *optional*, defaults to `5`):
            Draft steps trained. Cost grows linearly; the drafter is poor at drafting more tokens than this.
        max_tokens_per_step (`int`, *optional*, defaults to `512`):
            Tokens of one packed batch. Smaller means more updates from the same data and a quicker reaction to the
            stop signal; larger means less overhead and fewer long samples cut, because a longer sample is trained on
            in windows.
        loss_decay (`float`, *optional*, defaults to `0.8`):
            Weight of draft step i is `loss_decay ** (i - 1)`: later tokens count only when earlier ones are accepted.
        max_grad_norm (`float`, *optional*, defaults to `0.5`):
            The drafter's own clip.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            AdamW's weight decay.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature of the rollouts, whose distribution is learned.
        autocast_dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            Dtype of the matrix products. `torch.float32` switches autocast off.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the trainer's own generator.

    Raises:
        `ValueError`: If a number that must be positive is not.
    """

    learning_rate: float = 5e-4
    warmup_steps: int = 10
    unroll_steps: int = 5
    max_tokens_per_step: int = 512
    loss_decay: float = 0.8
    max_grad_norm: float = 0.5
    weight_decay: float = 0.0
    temperature: float = 1.0
    autocast_dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def __post_init__(self):
        may_be_zero = ("warmup_steps", "weight_decay", "autocast_dtype", "seed")
        for name in [spec.name for spec in fields(self) if spec.name not in may_be_zero]:
            if not vars(self)[name] > 0:
                raise ValueError(f"{name}={vars(self)[name]} must be greater than 0.")


class _StepInterrupted(Exception):
    """Leaves an optimiser step that is no longer wanted, from wherever in it the question was asked."""


def _never() -> bool:
    return False


class DrafterTrainer:
    """
    Trains a [`Drafter`] on the samples of a [`FeatureBuffer`].

    Args:
        drafter ([`Drafter`]):
            The drafter, with fp32 parameters (bf16 parameters are many times slower in backward on CPU, and lose small
            updates everywhere). It is trained where it is.
        buffer ([`FeatureBuffer`]):
            Where the samples come from.
        args ([`DrafterTrainingArguments`], *optional*):
            How to train.
        clock (`Callable[[], float]`, *optional*, defaults to `time.perf_counter`):
            Monotonic clock in seconds.

    Attributes:
        learning_rate (`float`), temperature (`float`):
            Those of `args`, which may be changed between steps.
    """

    def __init__(
        self,
        drafter: Drafter,
        buffer: FeatureBuffer,
        args: DrafterTrainingArguments | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.args = args = DrafterTrainingArguments() if args is None else args
        self.device = drafter.device
        self.drafter = drafter
        self.buffer = buffer
        self.learning_rate = args.learning_rate
        self.temperature = args.temperature
        self.generator = torch.Generator().manual_seed(args.seed)
        self.parameters = drafter.trained_parameters()
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
        )
        self.steps = 0
        self.tokens_trained = 0
        self.dropped_batches = 0
        self._clock = clock
        self._times = StepTimes()
        self._good = GoodState(self.parameters, self.optimizer)
        self._embed_tokens: Tensor | None = None
        self._lm_head: Tensor | None = None
        self._draft_head: Tensor | None = None

    @torch.no_grad()
    def set_policy(self, embed_tokens: Tensor, lm_head: Tensor) -> None:
        """
        Set the policy's embedding and head, each of shape (vocab_size, H), that the drafter learns from.

        They are used as they are where device and dtype fit, so they must be copies taken at weight-sync time and not
        parameters that are being trained. Training needs the head's rows of the draft vocabulary; the whole head
        serves [`evaluate`] only.
        """
        expected = (self.drafter.config.vocab_size, self.drafter.config.hidden_size)
        for name, tensor in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but the drafter's policy has {expected}.")
        is_tied = embed_tokens.data_ptr() == lm_head.data_ptr()
        self._embed_tokens = embed_tokens.detach().to(self.device, self.args.autocast_dtype)
        self._lm_head = self._embed_tokens if is_tied else lm_head.detach().to(self.device, self.args.autocast_dtype)
        drafter = self.drafter
        self._draft_head = self._lm_head if drafter.has_full_vocabulary else self._lm_head[drafter.draft_token_ids]

    @property
    def step_s(self) -> float:
        """Estimated seconds of an optimiser step; 0.0 before the first."""
        return self._times.step_s

    def keep_good_state(self) -> None:
        """Remembers weights and optimiser state as those to go back to after a fault; nothing if they are broken."""
        self._good.keep(self.steps, self.tokens_trained)

    def restore_good_state(self) -> None:
        """Goes back to the last good weights and optimiser state; without one nothing changes."""
        self.optimizer.zero_grad(set_to_none=True)
        counters = self._good.restore()
        if counters is not None:
            self.steps, self.tokens_trained = counters

    def end_period(self) -> None:
        """
        Ends a period of training: what it takes beyond weights and optimiser state is given back; the next one begins
        with [`set_policy`]. The copy of the good state is part of that, and would be none for the time after, when
        ranks have merged their drafters.
        """
        self._good.discard()
        self._embed_tokens = self._lm_head = self._draft_head = None
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self, max_tokens: int | None = None, stop: Callable[[], bool] = _never) -> StepResult:
        """
        One optimiser step on one packed batch.

        Args:
            max_tokens (`int`, *optional*):
                Tokens of this batch, when fewer than `args.max_tokens_per_step` are wanted.
            stop (`Callable[[], bool]`, *optional*):
                Asked after every draft step of the forward and of the backward pass; when it is true the step is
                abandoned. After the last of them it is not asked any more: what is left is short against what is done.

        Returns:
            [`StepResult`]: How it ended, and its metrics.
        """
        self._check_policy()
        if self._good.is_empty:
            self.keep_good_state()
        limit = self.args.max_tokens_per_step
        max_tokens = limit if max_tokens is None else min(max_tokens, limit)
        samples = self.buffer.sample_batch(max_tokens, self.generator)
        if not samples:
            return StepResult(StepOutcome.STARVED)
        batch = pack([crop(sample, max_tokens, self.generator) for sample in samples])
        if len(batch.rows(0)) == 0:
            return StepResult(StepOutcome.STARVED)
        self.optimizer.zero_grad(set_to_none=True)
        try:
            loss, metrics = self._loss(batch.to(self.device), stop)
            loss.backward()
        except _StepInterrupted:
            self.optimizer.zero_grad(set_to_none=True)
            return StepResult(StepOutcome.INTERRUPTED)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)
        if not torch.isfinite(loss + grad_norm):
            return self._drop_batch()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * min(1.0, (self.steps + 1) / max(1, self.args.warmup_steps))
        self.optimizer.step()
        self.steps += 1
        self.tokens_trained += batch.num_tokens
        return StepResult(StepOutcome.TRAINED, batch.num_tokens, metrics | {"grad_norm": grad_norm.item()})

    def train_for(
        self, budget_s: float, stop: Callable[[], bool] = _never, max_step_s: float = float("inf")
    ) -> TrainingReport:
        """
        Trains until the time is up, `stop()` is true, there is nothing to train on, or batch after batch is dropped.

        A step is begun only when the running estimate of its time still fits, so the budget is exceeded by at most one
        step. The first step of all has no estimate and is begun when there is any budget. The step that `stop()` comes
        in is abandoned: work already done used idle time and cost nothing, finishing the step would delay others.

        Args:
            budget_s (`float`):
                Time to spend.
            stop (`Callable[[], bool]`, *optional*):
                Asked before every step and several times in it.
            max_step_s (`float`, *optional*, defaults to no limit):
                Longest step wanted, and with it what abandoning one wastes; batches are made smaller to keep to it.

        Returns:
            [`TrainingReport`]: Of this call.
        """
        started, tokens_before = self._clock(), self.tokens_trained
        outcomes: Counter[StepOutcome] = Counter()
        sums: dict[str, float] = defaultdict(float)
        step_time_s, dropped_in_a_row, is_state_kept = 0.0, 0, False
        while not stop() and dropped_in_a_row < MAX_DROPPED_IN_A_ROW:
            if self._clock() - started + self._times.step_s >= budget_s:
                break
            if not is_state_kept:
                # Not earlier: a call that finds no time to train must cost nothing.
                self.keep_good_state()
                is_state_kept = True
            began = self._clock()
            result = self.step(self._times.tokens_for(max_step_s), stop)
            outcomes[result.outcome] += 1
            if result.outcome in (StepOutcome.STARVED, StepOutcome.INTERRUPTED):
                break
            seconds = self._clock() - began
            step_time_s += seconds
            self._times.add(seconds, result.tokens)
            dropped_in_a_row = 0 if result.has_trained else dropped_in_a_row + 1
            for name, value in result.metrics.items():
                sums[name] += value
        worked = outcomes[StepOutcome.TRAINED] + outcomes[StepOutcome.DROPPED]
        return TrainingReport(
            steps=outcomes[StepOutcome.TRAINED],
            tokens=self.tokens_trained - tokens_before,  # without those that a restored state has lost
            dropped_batches=outcomes[StepOutcome.DROPPED],
            interrupted=outcomes[StepOutcome.INTERRUPTED],
            starved=int(outcomes[StepOutcome.STARVED] and budget_s > 0 and not worked),
            time_s=self._clock() - started,
            step_time_s=step_time_s,
            metric_sums=dict(sums),
        )

    def evaluate(self, samples: Sequence[FeatureSample]) -> dict[str, float]:
        """Loss and expected acceptance against the policy's *whole* vocabulary, see [`evaluate_drafter`]."""
        self._check_policy()
        if self.drafter.config.head == "policy":
            self.drafter.copy_head(self._lm_head)
        with self._autocast():
            return evaluate_drafter(
                self.drafter,
                [crop(sample, self.args.max_tokens_per_step, torch.Generator().manual_seed(0)) for sample in samples],
                self._embed_tokens,
                self._lm_head,
                num_steps=self.args.unroll_steps,
                temperature=self.temperature,
                max_tokens=self.args.max_tokens_per_step,
            )

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, counters, generator and step times. The weights are saved by [`Drafter.save_pretrained`]."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "steps": self.steps,
            "tokens_trained": self.tokens_trained,
            "dropped_batches": self.dropped_batches,
            "times": self._times.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with what `state_dict` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.steps = state["steps"]
        self.tokens_trained = state["tokens_trained"]
        self.dropped_batches = state["dropped_batches"]
        self._times.load_state_dict(state["times"])

    def _loss(self, batch: PackedBatch, stop: Callable[[], bool]) -> tuple[Tensor, dict[str, float]]:
        """Loss of one packed batch and its metrics; [`_StepInterrupted`] here or in its backward pass by `stop`."""

        def check(_: Tensor) -> None:
            if stop():
                raise _StepInterrupted

        rows = [batch.rows(step) for step in range(self.args.unroll_steps)]
        counts = [len(step_rows) for step_rows in rows]
        decays = [self.args.loss_decay**step if count else 0.0 for step, count in enumerate(counts)]
        with self._autocast():
            states = []
            for hidden in unroll(self.drafter, batch, self._embed_tokens, self.args.unroll_steps):
                check(hidden)
                hidden.register_hook(check)  # called when the backward pass comes to this draft step
                states.append(hidden)
            loss, row_losses, accepted = soft_cross_entropy(
                self.drafter.norm(torch.cat(states)),
                self.drafter.lm_head.weight if self.drafter.config.head == "own" else self._draft_head,
                Teacher(batch.last_hidden_state, self._draft_head, self.temperature),
                # Row t of step j predicts token t + 2 + j, whose distribution is the policy's after token t + 1 + j.
                positions=torch.cat([step_rows + 1 + step for step, step_rows in enumerate(rows)]),
                row_weights=torch.cat(
                    [
                        torch.full((count,), decay / (max(1, count) * sum(decays)), device=self.device)
                        for count, decay in zip(counts, decays, strict=True)
                    ]
                ),
            )
        return loss, _step_metrics(loss, rows, row_losses.split(counts), accepted.split(counts))

    def _drop_batch(self) -> StepResult:
        self.optimizer.zero_grad(set_to_none=True)
        self.dropped_batches += 1
        if not self._good.weights_are_finite():
            self.restore_good_state()
        logger.warning(
            "The drafter's loss was not finite: batch %d was dropped and the weights are the last good ones.",
            self.dropped_batches,
        )
        return StepResult(StepOutcome.DROPPED)

    def _autocast(self) -> torch.autocast:
        enabled = self.args.autocast_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.args.autocast_dtype, enabled=enabled)

    def _check_policy(self) -> None:
        if self._embed_tokens is None:
            raise RuntimeError("DrafterTrainer has no policy to learn from: call `set_policy` before the first step.")


def _step_metrics(
    loss: Tensor, rows: Sequence[Tensor], losses: Sequence[Tensor], accepted: Sequence[Tensor]
) -> dict[str, float]:
    """`loss`, per draft step `loss_i` and `acceptance_i` (within the draft vocabulary), `acceptance_length`."""
    metrics = {"loss": loss.item()}
    for step, (step_losses, step_accepted) in enumerate(zip(losses, accepted, strict=True), start=1):
        if len(step_losses) > 0:
            metrics[f"loss_{step}"] = step_losses.mean().item()
            metrics[f"acceptance_{step}"] = step_accepted.mean().item()
    # Only rows that are trained in every step can be followed along the draft.
    chains = [values[torch.searchsorted(r, rows[-1])] for r, values in zip(rows, accepted, strict=True)]
    metrics["acceptance_length"] = simulated_acceptance_length(torch.stack(chains, dim=1))
    return metrics
