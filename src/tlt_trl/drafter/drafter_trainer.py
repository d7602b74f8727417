"""
Train the drafter one preemptible optimiser step at a time.

Everything here is the drafter's own: optimiser, gradient clip, random generator, copies of the policy's embedding and
head. A drafter loss under the policy's gradient-norm clip shrinks the policy's update about 20 times, and a draw from
the global random state makes the ranks of a tensor-parallel group sample different tokens.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .evaluation import evaluate_drafter
from .feature_buffer import FeatureBuffer, FeatureSample
from .losses import Teacher, simulated_acceptance_length, soft_cross_entropy
from .modeling_drafter import Drafter
from .packing import PackedBatch, crop, pack
from .unroll import unroll


logger = logging.getLogger(__name__)

# Below this a batch holds too little of an answer to learn its later draft steps from.
MIN_TOKENS_PER_STEP = 64

# Batches dropped one after the other that end a period of training: the cause is not in the batches.
MAX_DROPPED_IN_A_ROW = 3


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
            updates everywhere).
        buffer ([`FeatureBuffer`]):
            Where the samples come from.
        learning_rate (`float`, *optional*, defaults to `1e-3`):
            Constant after the warm-up: there is no end of training to decay towards.
        warmup_steps (`int`, *optional*, defaults to `10`):
            Optimiser steps of linear warm-up, over the whole life of the drafter.
        unroll_steps (`int`, *optional*, defaults to `5`):
            Draft steps trained. Cost grows linearly; the drafter is poor at drafting more tokens than this.
        max_tokens_per_step (`int`, *optional*, defaults to `1024`):
            Tokens of one packed batch. Smaller means more updates from the same data and a quicker reaction to the
            stop signal; larger means less overhead and fewer long samples cut, because a longer sample is trained on
            in windows.
        loss_decay (`float`, *optional*, defaults to `0.8`):
            Weight of draft step j is `loss_decay ** j`: later tokens count only when the earlier ones are accepted.
        max_grad_norm (`float`, *optional*, defaults to `0.5`):
            The drafter's own clip.
        weight_decay (`float`, *optional*, defaults to `0.0`):
            AdamW's weight decay.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature of the rollouts, whose distribution is learned.
        autocast_dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            Dtype of the matrix products. `torch.float32` switches autocast off.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the own generator.
        device (`torch.device`, *optional*):
            Where to train. Defaults to where the drafter is.
    """

    def __init__(
        self,
        drafter: Drafter,
        buffer: FeatureBuffer,
        *,
        learning_rate: float = 1e-3,
        warmup_steps: int = 10,
        unroll_steps: int = 5,
        max_tokens_per_step: int = 1024,
        loss_decay: float = 0.8,
        max_grad_norm: float = 0.5,
        weight_decay: float = 0.0,
        temperature: float = 1.0,
        autocast_dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        device: torch.device | None = None,
    ):
        _check_positive(
            learning_rate=learning_rate,
            unroll_steps=unroll_steps,
            max_tokens_per_step=max_tokens_per_step,
            loss_decay=loss_decay,
            max_grad_norm=max_grad_norm,
            temperature=temperature,
        )
        self.device = torch.device(drafter.device if device is None else device)
        self.drafter = drafter.to(self.device)
        self.buffer = buffer
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.unroll_steps = unroll_steps
        self.max_tokens_per_step = max_tokens_per_step
        self.loss_decay = loss_decay
        self.max_grad_norm = max_grad_norm
        self.temperature = temperature
        self.autocast_dtype = autocast_dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True
        )
        self.steps = 0
        self.tokens_trained = 0
        self.dropped_batches = 0
        self._embed_tokens: Tensor | None = None
        self._lm_head: Tensor | None = None
        self._draft_head: Tensor | None = None
        self._good_state: list[Tensor] = []
        self._good_counters = (0, 0)
        self._step_seconds: float | None = None  # running estimates
        self._token_seconds: float | None = None

    @torch.no_grad()
    def set_target(self, embed_tokens: Tensor, lm_head: Tensor) -> None:
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
        self._embed_tokens = embed_tokens.detach().to(self.device, self.autocast_dtype)
        self._lm_head = self._embed_tokens if is_tied else lm_head.detach().to(self.device, self.autocast_dtype)
        drafter = self.drafter
        self._draft_head = self._lm_head if drafter.has_full_vocabulary else self._lm_head[drafter.draft_token_ids]

    @torch.no_grad()
    def keep_good_state(self) -> None:
        """Remembers weights and optimiser state as those to go back to after a fault; nothing if they are broken."""
        if not self._parameters_are_finite():
            return
        state = self._state_tensors()
        if self._good_state:
            for kept, tensor in zip(self._good_state, state, strict=True):
                kept.copy_(tensor)
        else:
            self._good_state = [tensor.clone() for tensor in state]
        self._good_counters = (self.steps, self.tokens_trained)

    @torch.no_grad()
    def restore_good_state(self) -> None:
        """Goes back to the last good weights and optimiser state; without one nothing changes."""
        self.optimizer.zero_grad(set_to_none=True)
        if not self._good_state:
            return
        for kept, tensor in zip(self._good_state, self._state_tensors(), strict=True):
            tensor.copy_(kept)
        self.steps, self.tokens_trained = self._good_counters

    def end_period(self) -> None:
        """
        Ends a period of training: what it takes beyond weights and optimiser state is given back; the next one begins
        with [`set_target`]. The copy of the good state is part of that, and would be none for the time after, when
        ranks have merged their drafters.
        """
        self._good_state = []
        self._embed_tokens = self._lm_head = self._draft_head = None
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self, max_tokens: int | None = None, stop: Callable[[], bool] = _never) -> dict[str, float] | None:
        """
        One optimiser step on one packed batch.

        Args:
            max_tokens (`int`, *optional*):
                Tokens of this batch, when fewer than `max_tokens_per_step` are wanted.
            stop (`Callable[[], bool]`, *optional*):
                Asked after every draft step of the forward and of the backward pass; when it is true the step is
                abandoned. After the last of them it is not asked any more: what is left is short against what is done.

        Returns:
            `dict[str, float]` or `None`: metrics of the batch; only `dropped_batches` when it was dropped because its
            loss or gradient was not finite, only `interrupted` when it was abandoned (the weights are then as before);
            `None` when there is nothing to train on.
        """
        self._check_target()
        if not self._good_state:
            self.keep_good_state()
        max_tokens = self.max_tokens_per_step if max_tokens is None else min(max_tokens, self.max_tokens_per_step)
        samples = self.buffer.sample_batch(max_tokens, self.generator)
        if not samples:
            return None
        batch = pack([crop(sample, max_tokens, self.generator) for sample in samples])
        if len(batch.rows(0)) == 0:
            return None
        self.optimizer.zero_grad(set_to_none=True)
        try:
            loss, metrics = self._loss(batch.to(self.device), stop)
            loss.backward()
        except _StepInterrupted:
            self.optimizer.zero_grad(set_to_none=True)
            return {"interrupted": 1.0}
        grad_norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.max_grad_norm)
        if not torch.isfinite(loss + grad_norm):
            return self._drop_batch()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * min(1.0, (self.steps + 1) / max(1, self.warmup_steps))
        self.optimizer.step()
        self.steps += 1
        self.tokens_trained += batch.num_tokens
        return metrics | {"grad_norm": grad_norm.item(), "tokens": float(batch.num_tokens)}

    def train_for(
        self, seconds_budget: float, stop: Callable[[], bool] = _never, max_step_s: float = float("inf")
    ) -> dict[str, float]:
        """
        Train until the time is up, `stop()` is true, there is nothing to train on, or batch after batch is dropped.

        A step is begun only when the running estimate of its time still fits, so the budget is exceeded by at most one
        step. The first step of all has no estimate and is begun when there is any budget. The step that `stop()` comes
        in is abandoned: the time that it has taken is free, what it would take is somebody else's.

        Args:
            seconds_budget (`float`):
                Time to spend.
            stop (`Callable[[], bool]`, *optional*):
                Asked before every step and several times in it.
            max_step_s (`float`, *optional*, defaults to no limit):
                Longest step wanted, and with it what abandoning one wastes; batches are made smaller to keep to it.

        Returns:
            `dict[str, float]`: of this call `steps`, `tokens`, `dropped_batches`, `seconds` and, within them, the
            seconds inside optimiser steps that were not abandoned (`step_seconds`); `interrupted`, 1.0 when one was;
            `starved`, 1.0 when there was a budget and nothing to train on; and the mean of the steps' other metrics.
        """
        start = time.perf_counter()
        sums: dict[str, float] = defaultdict(float)
        steps = step_seconds = dropped = starved = interrupted = 0.0
        tokens_before = self.tokens_trained
        dropped_in_a_row = 0
        is_state_kept = False
        while not stop():
            began = time.perf_counter()
            if began - start + (self._step_seconds or 0.0) > seconds_budget:
                break
            if not is_state_kept:
                # Not earlier: a call that finds no time to train must cost nothing.
                self.keep_good_state()
                is_state_kept = True
                began = time.perf_counter()
            metrics = self.step(self._tokens_for(max_step_s), stop)
            if metrics is None:
                starved = float(seconds_budget > 0 and not (steps or dropped))
                break
            if "interrupted" in metrics:
                interrupted = 1.0
                break
            seconds = time.perf_counter() - began
            step_seconds += seconds
            self._update_step_seconds(seconds)
            if "loss" not in metrics:
                dropped += 1
                dropped_in_a_row += 1
                if dropped_in_a_row == MAX_DROPPED_IN_A_ROW:
                    break
                continue
            dropped_in_a_row = 0
            self._update_token_seconds(seconds / metrics.pop("tokens"))
            steps += 1
            for name, value in metrics.items():
                sums[name] += value
        means = {name: value / steps for name, value in sums.items()}
        return means | {
            "steps": steps,
            "tokens": float(self.tokens_trained - tokens_before),  # without those that a restored state has lost
            "dropped_batches": dropped,
            "starved": starved,
            "interrupted": interrupted,
            "seconds": time.perf_counter() - start,
            "step_seconds": step_seconds,
        }

    def evaluate(self, samples: Sequence[FeatureSample]) -> dict[str, float]:
        """Loss and expected acceptance against the policy's *whole* vocabulary, see [`evaluate_drafter`]."""
        self._check_target()
        with self._autocast():
            return evaluate_drafter(
                self.drafter,
                [crop(sample, self.max_tokens_per_step, torch.Generator().manual_seed(0)) for sample in samples],
                self._embed_tokens,
                self._lm_head,
                num_steps=self.unroll_steps,
                temperature=self.temperature,
                max_tokens=self.max_tokens_per_step,
            )

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, counters, generator and step times. The weights are saved by [`Drafter.save_pretrained`]."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "steps": self.steps,
            "tokens_trained": self.tokens_trained,
            "dropped_batches": self.dropped_batches,
            "step_seconds": self._step_seconds,
            "token_seconds": self._token_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.steps = state["steps"]
        self.tokens_trained = state["tokens_trained"]
        self.dropped_batches = state["dropped_batches"]
        self._step_seconds = state["step_seconds"]
        self._token_seconds = state["token_seconds"]

    def _loss(self, batch: PackedBatch, stop: Callable[[], bool]) -> tuple[Tensor, dict[str, float]]:
        """Loss of one packed batch and its metrics; [`_StepInterrupted`] here or in its backward pass by `stop`."""

        def check(_: Tensor) -> None:
            if stop():
                raise _StepInterrupted

        rows = [batch.rows(step) for step in range(self.unroll_steps)]
        counts = [len(step_rows) for step_rows in rows]
        decays = [self.loss_decay**step if count else 0.0 for step, count in enumerate(counts)]
        with self._autocast():
            states = []
            for hidden in unroll(self.drafter, batch, self._embed_tokens, self.unroll_steps):
                check(hidden)
                hidden.register_hook(check)  # called when the backward pass comes to this draft step
                states.append(hidden)
            loss, row_losses, accepted = soft_cross_entropy(
                self.drafter.norm(torch.cat(states)),
                self.drafter.lm_head.weight,
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

    def _drop_batch(self) -> dict[str, float]:
        self.optimizer.zero_grad(set_to_none=True)
        self.dropped_batches += 1
        if not self._parameters_are_finite():
            self.restore_good_state()
        logger.warning(
            "The drafter's loss was not finite: batch %d was dropped and the weights are the last good ones.",
            self.dropped_batches,
        )
        return {"dropped_batches": float(self.dropped_batches)}

    def _state_tensors(self) -> list[Tensor]:
        """Weights and optimiser state; what AdamW makes at its first step is made here if that is still to come."""
        parameters = list(self.drafter.parameters())
        for parameter in parameters:
            if not self.optimizer.state[parameter]:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        state = [self.optimizer.state[p][name] for p in parameters for name in ("step", "exp_avg", "exp_avg_sq")]
        return [*parameters, *state]

    def _parameters_are_finite(self) -> bool:
        return all(bool(torch.isfinite(parameter).all()) for parameter in self.drafter.parameters())

    def _update_step_seconds(self, seconds: float) -> None:
        self._step_seconds = seconds if self._step_seconds is None else 0.7 * self._step_seconds + 0.3 * seconds

    def _tokens_for(self, max_step_s: float) -> int | None:
        """Tokens that one step can take in that time; a first step has no estimate and is the smallest there is."""
        if max_step_s == float("inf"):
            return None
        if self._token_seconds is None:
            return MIN_TOKENS_PER_STEP
        return max(MIN_TOKENS_PER_STEP, int(max_step_s / self._token_seconds))

    def _update_token_seconds(self, seconds: float) -> None:
        self._token_seconds = seconds if self._token_seconds is None else 0.7 * self._token_seconds + 0.3 * seconds

    def _autocast(self) -> torch.autocast:
        enabled = self.autocast_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=enabled)

    def _check_target(self) -> None:
        if self._embed_tokens is None:
            raise RuntimeError("DrafterTrainer has no policy to learn from: call `set_target` before the first step.")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be greater than 0.")


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
