"""The drafter that learns while the run goes on: what it is trained on, when, and how ranks stay together."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from .drafter.drafter_trainer import DrafterTrainer, DrafterTrainingArguments
from .drafter.feature_buffer import FeatureBuffer
from .drafter.features import FeatureRecorder
from .drafter.live_vocabulary import LiveVocabulary
from .drafter.modeling_drafter import Drafter
from .drafter.pass_to_record import PassToRecord
from .drafter.ranks import check_identical
from .drafter.training_report import MAXIMA, TrainingReport
from .drafter.training_state import cpu_copy
from .generation.speculative_generation import SpeculativeVLLMGeneration
from .idle.averaging import average_by_tokens
from .idle.payback import PayBack
from .idle.spot_training import (
    MAX_STEP_S,
    BackgroundTraining,
    Guests,
    PolicyCopy,
    serve_until_all_finished,
    train_safely,
    train_until_all_finished,
)
from .idle.step_account import StepAccount
from .idle.step_clock import StepClock
from .idle.straggler_wait import StragglerWait
from .telemetry.alarms import Alarms
from .telemetry.metrics import step_metric_names, training_metrics
from .telemetry.reduce import sum_over_ranks
from .telemetry.timeline import DRAFTER_TRAINING, MERGING, WAITING, NoTimeline, Timeline
from .tlt_grpo_config import TLTGRPOConfig
from .upstream import default_store


# The drafter computes as the policy does. Not in fp16, whose gradients need a loss scaler of their own.
AUTOCAST_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float32, "fp8": torch.bfloat16}

# Greedy answers are learnt at this temperature: labels that are nearly certain, from logits that stay finite.
MIN_TEMPERATURE = 0.1

# Rollouts after which features are dropped.
MAX_AGE_ROLLOUTS = 4


class OnlineDrafter:
    """
    Trains a drafter beside the policy, from the hidden states of the policy's own forward passes.

    With several processes every rank trains while it waits for the last one to finish its rollout, and the drafters
    are merged when it has. A single process trains, if asked to, in a thread while reward functions and tools run (the
    Spot Trainer of TLT, arXiv 2511.16665). Beyond such waits both train for as long as speculation pays for it.

    Args:
        drafter ([`Drafter`]):
            Trained in place.
        policy (`torch.nn.Module`):
            The policy, without DDP around it.
        accelerator ([`~accelerate.Accelerator`]):
            Of the run.
        args ([`DrafterTrainingArguments`]):
            How to train.
        buffer ([`FeatureBuffer`]):
            Where recorded features go.
        policy_copy (`Callable[[], tuple[torch.Tensor, torch.Tensor]]`):
            Embedding and head of the policy as they were pushed last.
        pass_to_record ([`PassToRecord`]):
            Which of the policy's forward passes the features are taken from.
        payback ([`PayBack`]):
            Decides what training may cost.
        step_clock ([`StepClock`], *optional*):
            Measures whole steps.
        wait ([`StragglerWait`], *optional*):
            Of several processes.
        guests ([`Guests`], *optional*):
            Samples of other ranks that this one may run while it waits.
        in_background (`bool`, *optional*, defaults to `False`):
            Whether to train in a thread inside [`in_background`][OnlineDrafter.in_background].
        temperature (`Callable[[], float]`, *optional*):
            What the rollout is sampled at, asked when one is done; by default `args.temperature`.
        on_trained (`Callable[[], None]`, *optional*):
            Called whenever the weights have changed.
        speculate (`Callable[[bool], None]`, *optional*):
            Told whether speculation pays for itself, whenever that is decided.
        alarms ([`Alarms`], *optional*):
            Told how training goes.
        timeline ([`Timeline`], *optional*):
            Where training is noted.
    """

    def __init__(
        self,
        drafter: Drafter,
        policy: torch.nn.Module,
        accelerator: Accelerator,
        args: DrafterTrainingArguments,
        buffer: FeatureBuffer,
        *,
        policy_copy: Callable[[], PolicyCopy],
        pass_to_record: PassToRecord,
        payback: PayBack,
        step_clock: StepClock | None = None,
        wait: StragglerWait | None = None,
        guests: Guests | None = None,
        in_background: bool = False,
        temperature: Callable[[], float] | None = None,
        on_trained: Callable[[], None] = lambda: None,
        speculate: Callable[[bool], None] = lambda _: None,
        alarms: Alarms | None = None,
        timeline: Timeline | NoTimeline | None = None,
    ):
        self.drafter = drafter
        self.buffer = buffer
        self.trainer = DrafterTrainer(drafter, buffer, args)
        self.recorder = FeatureRecorder(policy, drafter.config.eagle_aux_hidden_state_layer_ids, buffer)
        self._vocabulary = LiveVocabulary(drafter, buffer, lambda counts: accelerator.reduce(counts, "sum"))
        self.payback = payback
        self.step_clock = StepClock() if step_clock is None else step_clock
        self.tokens_trained = 0  # by all ranks together
        self._accelerator = accelerator
        self._policy_copy = policy_copy
        self._pass_to_record = pass_to_record
        self._wait = wait
        self._guests = guests
        self._background = BackgroundTraining(self._train_until, self._note_background) if in_background else None
        self._temperature = (lambda: args.temperature) if temperature is None else temperature
        self._on_trained = on_trained
        self._speculate = speculate
        self._alarms = Alarms() if alarms is None else alarms
        self._timeline = NoTimeline() if timeline is None else timeline
        self._report = TrainingReport()  # since the last metrics, as the next two
        self._training_s = 0.0  # outside of waits
        self._background_latency_s = 0.0
        self._rollout: Mapping[str, float] | None = None  # metrics of the last one
        self._policy_step = 0
        self._is_compared = False  # with the drafters of the other ranks, in this run

    @property
    def steps(self) -> int:
        """Optimiser steps of this rank over the life of the drafter."""
        return self.trainer.steps

    # ---- what the run tells ----------------------------------------------------------------------------------------

    def start_run(self) -> None:
        """Begins a run: clocks and step numbers of an earlier one of this process mean nothing any more."""
        self.step_clock.start_run()
        self.payback.start_run()
        self._speculate(self.payback.plan.speculates)
        self.buffer.start_run()
        self._is_compared = False

    def evaluating(self) -> AbstractContextManager[None]:
        """Around an evaluation, which is no part of a step: ten minutes of it must not earn the drafter a minute."""
        return self.step_clock.uncounted()

    def start_rollout(self, step: int) -> None:
        """Begins a training rollout at that step of the policy; every rank must call it."""
        if self._wait is not None and not self._is_compared:
            check_identical(self.drafter, self._accelerator.gather)
            self._is_compared = True
        self.step_clock.start()
        self._policy_step = step
        self.buffer.start_step(step)
        if self._vocabulary.follow():
            self._on_trained()

    def note_rollout(self, metrics: Mapping[str, float]) -> None:
        """What a training rollout did, over all ranks: what speculation saved in it has to pay for the drafter."""
        self._rollout = metrics

    def start_scoring(self, is_training: bool) -> None:
        """A generation begins, whose answers are scored next."""
        self._pass_to_record.start_generation(is_training)

    def recording(
        self, input_ids: Tensor, attention_mask: Tensor, prompt_length: int, step: int, micro_step: int
    ) -> AbstractContextManager[None]:
        """
        Around every forward pass of the policy; records the one that the features are taken from.

        Args:
            input_ids, attention_mask, prompt_length, step:
                As in [`FeatureRecorder.recording`].
            micro_step (`int`):
                Calls of `training_step` so far.
        """
        is_taken = self._pass_to_record.take(micro_step)
        if not is_taken or not self.payback.plan.captures:
            return nullcontext()
        return self.recorder.recording(input_ids, attention_mask, prompt_length, step)

    # ---- when it trains --------------------------------------------------------------------------------------------

    def train_after_rollout(self) -> None:
        """Trains while other ranks are still generating, and beyond that for as long as it is paid for."""
        self.trainer.temperature = max(self._temperature(), MIN_TEMPERATURE)
        plan = self.payback.plan
        if self._wait is not None and plan.trains:
            self._train_in_wait(self._wait, plan.budget_s)
        elif self._wait is not None and self._guests is not None:
            with self._timeline.interval(WAITING):
                self._wait.announce()
                serve_until_all_finished(self._wait, self._guests)
        elif plan.budget_s:
            self._note(self._train_outside_waits(plan.budget_s))

    def _train_in_wait(self, wait: StragglerWait, budget_s: float) -> None:
        with self._timeline.interval(WAITING):
            wait.announce()
            while_training = functools.partial(self._timeline.interval, DRAFTER_TRAINING)
            report = train_until_all_finished(self.trainer, wait, self._policy_copy(), while_training, self._guests)
        if budget_s:
            report += self._train_outside_waits(budget_s)
        with self._timeline.interval(MERGING):
            tokens = self._merge(report.tokens)
        # Without idle training the run would have gone on when the last rank was done.
        added_s = time.perf_counter() - wait.finished_at_s
        self._note(report + TrainingReport(idle_added_s=added_s), tokens)

    def _train_outside_waits(self, budget_s: float) -> TrainingReport:
        """On several ranks all of them do this, with the same budget."""
        started = time.perf_counter()
        with self._timeline.interval(DRAFTER_TRAINING):
            report = train_safely(self.trainer, self._policy_copy(), budget_s)
        self._training_s += time.perf_counter() - started
        return report

    def _merge(self, tokens: int) -> int:
        """
        Averages the drafters that ranks have just trained apart; every rank calls it, right after the wait.

        Between two rollouts all ranks therefore hold the same drafter, and whichever saves it saves everybody's work.
        """
        tensors: Sequence[Tensor] = self.trainer.parameters
        total = average_by_tokens(tensors, tokens, torch.distributed.all_reduce)
        if total:
            check_identical(self.drafter, self._accelerator.gather)
        return int(total)

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Trains in a thread for the time of the context, where that was asked for."""
        background = self._background if self.payback.plan.trains else None
        with nullcontext() if background is None else background.running():
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside [`in_background`][OnlineDrafter.in_background], does not train for the time of this context."""
        with nullcontext() if self._background is None else self._background.paused():
            yield

    def _train_until(self, stop: Callable[[], bool]) -> TrainingReport:
        return train_safely(self.trainer, self._policy_copy(), stop=stop, max_step_s=MAX_STEP_S)

    # ---- what came of it -------------------------------------------------------------------------------------------

    def _note(self, report: TrainingReport, tokens_of_all_ranks: int | None = None) -> None:
        tokens = report.tokens if tokens_of_all_ranks is None else tokens_of_all_ranks
        if tokens:
            self.tokens_trained += tokens
            self._on_trained()
        self._report += report

    def _note_background(self, report: TrainingReport) -> None:
        self._background_latency_s += report.stop_latency_s
        self._note(report)

    def pop_metrics(self) -> dict[str, float]:
        """
        Metrics of the training of all ranks since the last call, which ends a step for the pay-back; every rank must
        call it.
        """
        report, self._report = self._report, TrainingReport()
        unroll_steps = self.trainer.args.unroll_steps
        numbers = report.numbers()
        sums = {name: value for name, value in numbers.items() if name not in MAXIMA}
        sums |= {name: report.metric_sums.get(name, 0.0) for name in step_metric_names(unroll_steps)}
        sums["feature_capture_s"] = self.recorder.pop_capture_seconds()
        sums["buffer_tokens"] = self.buffer.num_tokens
        sums["step_s"] = self.step_clock.lap()
        maxima = {name: numbers[name] for name in MAXIMA}
        maxima |= {
            "training_s": self._training_s,
            "background_latency_s": self._background_latency_s,
            "optimizer_step_s": self.trainer.step_s,
        }
        self._training_s = self._background_latency_s = 0.0
        total = sum_over_ranks(self._accelerator, sums, maxima)
        self._alarms.observe_training(
            starved=total["starved"],
            steps=total["steps"],
            dropped_batches=total["dropped_batches"],
            failures=total["failures"],
        )
        rollout, self._rollout = self._rollout, None
        account = StepAccount.of(total, self._accelerator.num_processes, self._wait is not None, rollout)
        plan = self.payback.observe(account, self._policy_step + 1)
        self._speculate(plan.speculates)
        self._alarms.set("not_paying", not plan.speculates, self.payback.describe())
        why_untrained = self.payback.why_untrained()
        self._alarms.set("drafter_untrained", bool(why_untrained), why_untrained)
        return training_metrics(total, self._accelerator.num_processes, unroll_steps) | self.payback.metrics(account)

    def describe(self) -> str:
        """One line on whether the drafter pays for itself, as of the last metrics."""
        return self.payback.describe()

    def state_dict(self) -> dict[str, Any]:
        """
        What this rank needs beside the weights to go on as if it had not been interrupted. It stays as it is when
        training goes on, so that it can be written later than it is taken.
        """
        return {
            "trainer": cpu_copy(self.trainer.state_dict()),
            "buffer": self.buffer.state_dict(),
            "payback": self.payback.state_dict(),
            "step_clock": self.step_clock.state_dict(),
            "tokens_trained": self.tokens_trained,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with what `state_dict` returned, here or in a run that did not train its drafter."""
        self.tokens_trained = state["tokens_trained"]
        if "trainer" in state:
            self.trainer.load_state_dict(state["trainer"])
            if "buffer" in state:  # a push has left it out
                self.buffer.load_state_dict(state["buffer"])
            self.payback.load_state_dict(state["payback"])
            self.step_clock.load_state_dict(state["step_clock"])
            self._speculate(self.payback.plan.speculates)


def steps_per_rollout(steps_per_generation: int, num_iterations: int, gradient_accumulation_steps: int) -> int:
    """Optimiser steps of the policy that one rollout serves, at least 1: features age in rollouts."""
    return math.ceil(steps_per_generation * num_iterations / gradient_accumulation_steps)


def online_drafter_for(
    args: TLTGRPOConfig,
    accelerator: Accelerator,
    generation: SpeculativeVLLMGeneration,
    policy: torch.nn.Module,
    has_reward_model: bool,
    guests: Guests | None = None,
) -> OnlineDrafter:
    """
    The trainer of a run's drafter.

    Args:
        args ([`TLTGRPOConfig`]):
            Configuration of the run.
        accelerator ([`~accelerate.Accelerator`]):
            Of the run.
        generation ([`SpeculativeVLLMGeneration`]):
            Has the drafter, the policy's embedding and head, alarms and timeline.
        policy (`torch.nn.Module`):
            The policy, without DDP around it.
        has_reward_model (`bool`):
            Whether a reward function needs the accelerator.
        guests ([`Guests`], *optional*):
            Samples of other ranks that this one may run while it waits.
    """
    num_ranks, rank = accelerator.num_processes, accelerator.process_index
    training = DrafterTrainingArguments(
        learning_rate=args.drafter_learning_rate,
        # Longer drafts than the drafter is trained for are poor, and shorter ones waste training.
        unroll_steps=max(1, args.max_drafter_tokens),
        temperature=args.temperature,
        autocast_dtype=AUTOCAST_DTYPES[accelerator.mixed_precision],
        seed=args.seed + rank,
    )
    max_age = MAX_AGE_ROLLOUTS * steps_per_rollout(
        args.steps_per_generation, args.num_iterations, args.gradient_accumulation_steps
    )
    wait = None
    if num_ranks > 1:
        store, timeout_s = default_store(), args.ddp_timeout
        wait = StragglerWait(store, rank, num_ranks, timeout_s, group_size=args.vllm_tensor_parallel_size)
    in_background = _trains_in_background(args, accelerator, has_reward_model)
    payback = PayBack(
        args.drafter_time_budget,
        trains_in_waits=wait is not None or in_background,
        has_prices=args.speculation_selector != "fixed",
    )
    return OnlineDrafter(
        generation.drafter,
        policy,
        accelerator,
        training,
        FeatureBuffer(args.feature_buffer_tokens, max_age=max_age),
        policy_copy=lambda: (generation.policy_embedding, generation.policy_lm_head),
        pass_to_record=PassToRecord(
            args.steps_per_generation,
            args.num_iterations,
            args.gradient_accumulation_steps,
            args.vllm_importance_sampling_correction,
        ),
        payback=payback,
        wait=wait,
        guests=guests,
        in_background=in_background,
        temperature=lambda: generation.sampled_temperature,
        on_trained=generation.drafter_lag.note_trained,
        speculate=generation.rollout_loop.speculate_while_it_pays,
        alarms=generation.alarms,
        timeline=generation.timeline,
    )


def _trains_in_background(args: TLTGRPOConfig, accelerator: Accelerator, has_reward_model: bool) -> bool:
    wanted = args.drafter_background_training
    if accelerator.num_processes > 1:
        if wanted:
            raise ValueError(
                "`drafter_background_training=True` needs a single process: with several, ranks train while they wait "
                "for each other, and merge their drafters right after the rollout. Leave it unset."
            )
        return False
    return accelerator.device.type != "cpu" and not has_reward_model if wanted is None else wanted
