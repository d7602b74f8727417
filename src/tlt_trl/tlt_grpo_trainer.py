import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from tqdm.auto import tqdm
from transformers import PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from .drafter.dataset_tokens import count_tokens
from .drafter.drafter_trainer import DrafterTrainer
from .drafter.features import FeatureBuffer, FeatureRecorder
from .drafter.initialization import parameters_to_read
from .drafter.modeling_drafter import Drafter
from .drafter.vocabulary import most_frequent_token_ids
from .drafter_saving import DrafterSaving
from .generation.sampling_parameters import check_sampling_parameters
from .generation.speculative_generation import SpeculativeVLLMGeneration
from .idle.averaging import average_by_tokens, check_identical
from .idle.spot_training import MAX_STEP_S, BackgroundTraining, train_safely, train_until_all_finished
from .idle.straggler_wait import StragglerWait
from .strategy import describe, ledger_metrics, make_selector
from .strategy.menu import strategies_for
from .telemetry.metrics import (
    add_training_vectors,
    rollout_metrics,
    rollout_sums,
    training_metrics,
    training_vector,
)
from .telemetry.timeline import (
    DRAFTER_TRAINING,
    MERGING,
    POLICY_TRAINING,
    ROLLOUT,
    SCORING,
    WAITING,
    Timeline,
)
from .tlt_grpo_config import TLTGRPOConfig


logger = logging.getLogger(__name__)

# Rollouts after which features are dropped: the states of an old policy teach the wrong distribution.
FEATURE_MAX_AGE = 4

# The drafter computes as the policy does. Not in fp16, whose gradients need a loss scaler of their own.
AUTOCAST_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float32, "fp8": torch.bfloat16}


class TLTGRPOTrainer(DrafterSaving, GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] whose colocated vLLM engine decodes speculatively, with a drafter that follows the policy.

    A drop-in replacement: the arguments are those of [`~trl.GRPOTrainer`], in the same order, and a plain
    [`~trl.GRPOConfig`] is accepted. The completions are distributed exactly as the policy's, whatever the drafter is
    worth. With `use_vllm=False` or `vllm_mode="server"` it is TRL's trainer, and says so at start-up.

    The method was introduced in [Taming the Long-Tail: Efficient Reasoning RL Training with Adaptive
    Drafter](https://huggingface.co/papers/2511.16665), the choice of the strategy also in [RLHFSpec: Breaking the
    Efficiency Bottleneck in RLHF Training via Adaptive Drafting](https://huggingface.co/papers/2512.04752).

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, ...:
            As for [`~trl.GRPOTrainer`].
        drafter ([`Drafter`], *optional*):
            Drafter to start from, in place of `args.drafter_model_name_or_path`.

    Example:

    ```python
    from datasets import load_dataset
    from tlt_trl import TLTGRPOConfig, TLTGRPOTrainer
    from trl.rewards import accuracy_reward

    trainer = TLTGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=TLTGRPOConfig("output", use_vllm=True, vllm_mode="colocate"),
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    )
    trainer.train()
    ```
    """

    _tag_names = ["trl", "grpo", "tlt"]
    _name = "TLT"
    _paper = {
        "title": "Taming the Long-Tail: Efficient Reasoning RL Training with Adaptive Drafter",
        "id": "2511.16665",
    }

    # Class-level defaults: TRL's own tests make trainers with `object.__new__`.
    speculative = False
    drafter: Drafter | None = None
    drafter_trainer: DrafterTrainer | None = None
    feature_buffer: FeatureBuffer | None = None
    _recorder: FeatureRecorder | None = None
    _record_next_scoring_pass = False
    _last_rollout_end_s: float | None = None
    _drafter_credit_s = 0.0
    _drafter_tokens = 0  # trained on by all ranks together
    _straggler_wait: StragglerWait | None = None
    _background_training: BackgroundTraining | None = None
    timeline: Timeline | None = None

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: GRPOConfig | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
        *,
        drafter: Drafter | None = None,
    ):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = TLTGRPOConfig(f"{name.split('/')[-1]}-TLT")
        args = TLTGRPOConfig.from_grpo_config(args)
        self._given_drafter = drafter
        self._text_dataset = train_dataset
        self.speculative = args.use_vllm and args.vllm_mode == "colocate"
        if self.speculative:
            _check_sampling(args)
        else:
            logger.warning(
                "Speculative rollouts and drafter training are inactive: they need `use_vllm=True` and "
                "`vllm_mode='colocate'`. This run is TRL's GRPOTrainer."
            )
        with self._speculative_generation(args) if self.speculative else nullcontext():
            super().__init__(
                model,
                reward_funcs,
                args,
                train_dataset,
                eval_dataset,
                processing_class,
                reward_processing_classes,
                callbacks,
                optimizers,
                quantization_config,
                peft_config,
                tools,
                rollout_func,
                environment_factory,
            )
        del self._given_drafter, self._text_dataset
        if self.speculative:
            self.drafter = self.vllm_generation.drafter
            if args.drafter_training:
                self._init_drafter_training()
        if args.log_timeline:
            self._init_timeline()

    # ---- construction ----------------------------------------------------------------------------------------------

    @contextmanager
    def _speculative_generation(self, args: TLTGRPOConfig) -> Iterator[None]:
        """
        Lets `GRPOTrainer.__init__` build our generation class.

        It takes `VLLMGeneration` from its module's globals and offers no hook, so the name is replaced for the time of
        the call only.
        """
        original = grpo_trainer.VLLMGeneration
        grpo_trainer.VLLMGeneration = functools.partial(
            SpeculativeVLLMGeneration,
            args=args,
            build_drafter=self._build_drafter,
            make_selector=self._make_selector,
        )
        try:
            yield
        finally:
            grpo_trainer.VLLMGeneration = original

    def _build_drafter(
        self, policy: PreTrainedModel, gather_params: Callable[[list[torch.nn.Parameter]], AbstractContextManager]
    ) -> Drafter:
        args = self.args
        base = policy.get_base_model() if is_peft_model(policy) else policy
        if self._given_drafter is not None:
            drafter = self._given_drafter
        elif args.drafter_model_name_or_path is not None:
            drafter = Drafter.from_pretrained(args.drafter_model_name_or_path, base.config)
        else:
            draft_token_ids = self._draft_token_ids(base.config.get_text_config().vocab_size)
            # Under ZeRO-3 the policy is in pieces already, and need not fit on one device as a whole.
            with gather_params(parameters_to_read(base)):
                drafter = Drafter.from_policy(base, draft_token_ids=draft_token_ids)
        drafter.check_fits(base.config)
        return drafter.to(self.accelerator.device, torch.float32)

    def _draft_token_ids(self, vocab_size: int) -> torch.Tensor | None:
        size = self.args.drafter_vocab_size
        if size is None:
            return None
        if size > vocab_size:
            raise ValueError(
                f"`drafter_vocab_size` is {size}, larger than the policy's vocabulary of {vocab_size}. Leave it unset "
                "to draft over the whole vocabulary."
            )
        if self._text_dataset is None:
            raise ValueError(
                "`drafter_vocab_size` needs a `train_dataset`, to count which tokens are frequent. Leave it unset, or "
                "give a drafter that has its vocabulary, such as one from `tlt-trl warmup`."
            )
        counts = count_tokens(self._text_dataset, self._tokenizer, vocab_size)
        return most_frequent_token_ids(counts, size, always=self._tokenizer.all_special_ids)

    def _make_selector(self, max_batch_size: int, can_look_up: bool):
        args = self.args
        strategies = strategies_for(args.strategies, can_look_up)
        options = {}
        if args.speculation_selector == "fixed":
            options["activation_threshold"] = args.speculation_activation_threshold
        return make_selector(args.speculation_selector, strategies, max_batch_size, seed=args.seed, **options)

    def _init_drafter_training(self) -> None:
        args = self.args
        self.feature_buffer = FeatureBuffer(
            max_tokens=args.feature_buffer_tokens,
            max_age=FEATURE_MAX_AGE * self._policy_steps_per_rollout,
        )
        self._recorder = FeatureRecorder(
            self.accelerator.unwrap_model(self.model),
            self.drafter.config.eagle_aux_hidden_state_layer_ids,
            self.feature_buffer,
        )
        self.drafter_trainer = DrafterTrainer(
            self.drafter,
            self.feature_buffer,
            learning_rate=args.drafter_learning_rate,
            unroll_steps=args.max_drafter_tokens,
            max_tokens_per_step=args.drafter_max_tokens_per_step,
            temperature=self.temperature,
            autocast_dtype=AUTOCAST_DTYPES[self.accelerator.mixed_precision],
            seed=args.seed + self.accelerator.process_index,
        )
        self._training_vectors: list[list[float]] = []
        if self.accelerator.num_processes > 1:
            self._straggler_wait = StragglerWait(
                torch.distributed.distributed_c10d._get_default_store(),
                self.accelerator.process_index,
                self.accelerator.num_processes,
                timeout_s=args.ddp_timeout,
                group_size=args.vllm_tensor_parallel_size,
            )
        if self._trains_in_background():
            self._background_training = BackgroundTraining(self._train_drafter_beside, self._note_training)

    def _trains_in_background(self) -> bool:
        wanted = self.args.drafter_background_training
        if self.accelerator.num_processes > 1:
            if wanted:
                raise ValueError(
                    "`drafter_background_training=True` needs a single process: with several, ranks train while they "
                    "wait for each other, and merge their drafters right after the rollout. Leave it unset."
                )
            return False
        if wanted is None:
            has_reward_model = any(isinstance(reward, torch.nn.Module) for reward in self.reward_funcs)
            return self.accelerator.device.type != "cpu" and not has_reward_model
        return wanted

    def _init_timeline(self) -> None:
        accelerator = self.accelerator
        self.timeline = Timeline(
            Path(self.args.output_dir) / "timeline",
            accelerator.process_index,
            accelerator.num_processes,
            accelerator.wait_for_everyone,
        )
        self.add_callback(OptimizerStepInterval(self.timeline))
        if self.speculative:
            self.vllm_generation.timeline = self.timeline

    def _interval(self, name: str) -> AbstractContextManager:
        return nullcontext() if self.timeline is None else self.timeline.interval(name)

    def train(self, *args, **kwargs):
        self._undo_preparation_for_evaluation()
        return super().train(*args, **kwargs)

    def _undo_preparation_for_evaluation(self) -> None:
        """
        An evaluation before the training prepares the bare model, without DDP, and marks it as prepared; accelerate
        then never wraps it, and every rank trains a policy of its own (transformers 5.17, accelerate 1.15).
        """
        has_ddp = self.accelerator.use_distributed and not (self.is_deepspeed_enabled or self.is_fsdp_enabled)
        if has_ddp and vars(self.model).pop("_is_accelerate_prepared", False):
            # Nor is there to be a second autocast around the first. Not `unwrap_model`: it also takes off TRL's patch.
            if "_original_forward" in vars(self.model):
                self.model.forward = vars(self.model).pop("_original_forward")

    # ---- rollout ---------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list):
        with self._interval(ROLLOUT):
            return self._generate_speculatively(prompts) if self.speculative else super()._generate(prompts)

    def _generate_speculatively(self, prompts: list):
        mode = "train" if self.model.training else "eval"
        if mode == "train" and self.drafter_trainer is not None:
            self.feature_buffer.start_step(self.state.global_step)
            started = time.perf_counter()
            with self._before_first_gather(functools.partial(self._train_drafter, started)):
                output = super()._generate(prompts)
        else:
            output = super()._generate(prompts)
        self._log_rollout(mode)
        return output

    def _generate_single_turn(self, *args, **kwargs):
        # Between the turns of a tool loop the engine has the accelerator to itself.
        with nullcontext() if self._background_training is None else self._background_training.paused():
            output = super()._generate_single_turn(*args, **kwargs)
        if self.speculative:
            self.vllm_generation.note_drafter_lag(self.state.global_step)
        return output

    def _tool_call_loop(self, *args, **kwargs):
        with self._beside_drafter_training():
            return super()._tool_call_loop(*args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        with self._beside_drafter_training():
            return super()._calculate_rewards(*args, **kwargs)

    def _beside_drafter_training(self) -> AbstractContextManager:
        if self._background_training is None or not self.model.training:
            return nullcontext()
        return self._background_training.running()

    @contextmanager
    def _before_first_gather(self, action: Callable[[], None]) -> Iterator[None]:
        """
        Runs `action` before the first `accelerator.gather` inside the context.

        That gather is where ranks wait for the last one to finish its rollout. It sits inside `GRPOTrainer._generate`,
        after tools, environments and `rollout_func`, so wrapping it covers all of them; code around `_generate` would
        come too late.
        """
        gather = self.accelerator.gather

        def act_and_gather(tensor):
            self.accelerator.gather = gather
            action()
            return gather(tensor)

        self.accelerator.gather = act_and_gather
        try:
            yield
        finally:
            self.accelerator.gather = gather

    @property
    def _policy_copy(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.vllm_generation.policy_embedding, self.vllm_generation.policy_lm_head

    def _train_drafter(self, rollout_started_s: float) -> None:
        """Trains the drafter while other ranks are still generating or, on a single process, within its budget."""
        if self._straggler_wait is None:
            # A budget of zero voids what a checkpoint of a run with another budget has left.
            if self.args.drafter_time_budget:
                self._note_training(self._train_within_budget(rollout_started_s))
            return
        with self._interval(WAITING):
            self._straggler_wait.announce()
            report = train_until_all_finished(
                self.drafter_trainer, self._straggler_wait, self._policy_copy, self._interval(DRAFTER_TRAINING)
            )
        with self._interval(MERGING):
            tokens = self._merge_drafters(report["tokens"])
        # Without idle training the run would have gone on when the last rank was done.
        report["idle_added_s"] = time.perf_counter() - self._straggler_wait.finished_at_s
        self._note_training(report, tokens)

    def _train_within_budget(self, rollout_started_s: float) -> dict[str, float]:
        """
        Trains for at most the drafter's share of the time since the last rollout ended.

        What is left of the share is carried over, so that optimiser steps longer than one rollout's share are still
        taken, only less often.
        """
        now = time.perf_counter()
        period_s = now - (self._last_rollout_end_s or rollout_started_s)
        self._drafter_credit_s += self.args.drafter_time_budget * period_s
        with self._interval(DRAFTER_TRAINING):
            report = train_safely(self.drafter_trainer, self._policy_copy, self._drafter_credit_s)
        self._last_rollout_end_s = time.perf_counter()
        # Time in which there was nothing to train on must not come back as one long pause.
        self._drafter_credit_s = 0.0 if report["starved"] else self._drafter_credit_s - report["seconds"]
        return report

    def evaluate(self, *args, **kwargs):
        began = time.perf_counter()
        metrics = super().evaluate(*args, **kwargs)
        if self._last_rollout_end_s is not None:
            # The drafter's share is one of training: an evaluation of ten minutes must not earn it a minute.
            self._last_rollout_end_s += time.perf_counter() - began
        return metrics

    def _train_drafter_beside(self, stop: Callable[[], bool]) -> dict[str, float]:
        """Trains the drafter in another thread than the trainer's until told to stop."""
        return train_safely(self.drafter_trainer, self._policy_copy, stop=stop, max_step_s=MAX_STEP_S)

    def _merge_drafters(self, tokens: float) -> float:
        """
        Averages the drafters that ranks have just trained apart; every rank calls it, right after the wait.

        Between two rollouts all ranks therefore hold the same drafter, and whichever saves it saves everybody's work.

        Returns:
            `float`: Tokens trained by all ranks.
        """
        tensors = list(self.drafter.parameters())
        total = average_by_tokens(tensors, tokens, torch.distributed.all_reduce)
        if total:
            check_identical(tensors, self.accelerator.gather)
        return total

    def _note_training(self, report: dict[str, float], tokens_of_all_ranks: float | None = None) -> None:
        """Takes note of one period of drafter training of this rank."""
        tokens = report["tokens"] if tokens_of_all_ranks is None else tokens_of_all_ranks
        if tokens:
            self.vllm_generation.drafter_version += 1
            self._drafter_tokens += int(tokens)
        self._training_vectors.append(training_vector(report, self.args.max_drafter_tokens))

    def _log_drafter_training(self) -> None:
        """Logs the drafter training of all ranks since the last call."""
        rest = {
            "feature_capture_s": self._recorder.pop_capture_seconds(),
            "buffer_tokens": self.feature_buffer.num_tokens,
        }
        unroll_steps = self.args.max_drafter_tokens
        own = add_training_vectors([*self._training_vectors, training_vector(rest, unroll_steps)])
        self._training_vectors = []
        # fp32: an accelerator may have no fp64.
        rows = self.accelerator.gather(torch.tensor([own], device=self.accelerator.device)).tolist()
        metrics = training_metrics(add_training_vectors(rows), self.accelerator.num_processes, unroll_steps)
        self.vllm_generation.alarms.observe_training(
            starved=metrics["tlt/drafter/starved"],
            steps=metrics["tlt/drafter/steps"],
            dropped_batches=metrics["tlt/drafter/dropped_batches"],
            failures=metrics["tlt/drafter/failures"],
        )
        metrics |= self.vllm_generation.alarms.metrics()
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _log_rollout(self, mode: str) -> None:
        generation = self.vllm_generation
        loop = generation.rollout_loop
        ledger = loop.pop_ledger()
        own = rollout_sums(loop.pop_stats(), self.args.max_draft_tokens)
        ranks_per_engine = self.args.vllm_tensor_parallel_size
        sums = torch.tensor([*own, *ledger.sums()], device=self.accelerator.device)
        # The ranks of a tensor-parallel group have all run the same samples.
        sums *= float(self.accelerator.process_index % ranks_per_engine == 0)
        sums = self.accelerator.reduce(sums, reduction="sum").tolist()
        metrics = rollout_metrics(sums[: len(own)], self.accelerator.num_processes // ranks_per_engine)
        metrics |= ledger_metrics(loop.selector.strategies, sums[len(own) :])
        metrics["tlt/sync_seconds"] = generation.pop_sync_seconds()
        if mode == "train":
            generation.observe_rollout(metrics["tlt/acceptance_length"], metrics["tlt/draft_tokens/proposed"])
            if self.drafter_trainer is None:  # else when its training is known, in `_log_drafter_training`
                metrics |= generation.alarms.metrics()
        if mode == "train" and self.accelerator.is_main_process:
            say = logger.info if self.args.disable_tqdm else tqdm.write
            say(describe(metrics, ledger.choices()))
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    # ---- features --------------------------------------------------------------------------------------------------

    @property
    def _generate_every(self) -> int:
        """Micro-steps of one generation, which serves `num_iterations` passes over `steps_per_generation` of them."""
        return self.args.steps_per_generation * self.num_iterations

    @property
    def _policy_steps_per_rollout(self) -> int:
        """At least 1."""
        return math.ceil(self._generate_every / self.args.gradient_accumulation_steps)

    @property
    def _has_scoring_pass(self) -> bool:
        """Whether TRL runs the policy without gradients over every generation (its condition, word for word)."""
        return self.args.gradient_accumulation_steps % self._generate_every != 0 or (
            self.use_vllm and self.vllm_importance_sampling_correction
        )

    def _generate_and_score_completions(self, inputs):
        # The scoring pass is the first without gradients after a generation; the reference pass, which for PEFT runs
        # on the same module with its adapters disabled, is the second and must not be recorded.
        is_training = self._recorder is not None and self.model.training
        self._record_next_scoring_pass = is_training and self._has_scoring_pass
        with self._interval(SCORING):
            output = super()._generate_and_score_completions(inputs)
        if is_training:
            self._log_drafter_training()
        return output

    def training_step(self, *args, **kwargs):
        if self.timeline is not None:
            self.timeline.step = self.state.global_step
        with self._interval(POLICY_TRAINING):
            return super().training_step(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        if not self._should_record():
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        self._record_next_scoring_pass = False
        prompt_length = input_ids.size(1) - logits_to_keep
        with self._recorder.recording(input_ids, attention_mask, prompt_length, step=self.state.global_step):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )

    def _should_record(self) -> bool:
        if self._recorder is None or not self.model.training:
            return False
        if self._has_scoring_pass:
            return self._record_next_scoring_pass and not torch.is_grad_enabled()
        # Without a scoring pass the features come from the loss, in the first of `num_iterations` passes only.
        return torch.is_grad_enabled() and self._step % self._generate_every < self.args.steps_per_generation


class OptimizerStepInterval(TrainerCallback):
    """The policy's optimiser step, which is outside `training_step`, is policy training too."""

    def __init__(self, timeline: Timeline):
        self.timeline = timeline

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._interval = self.timeline.interval(POLICY_TRAINING)
        self._interval.__enter__()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._interval.__exit__(None, None, None)


def _check_sampling(args: TLTGRPOConfig) -> None:
    """Refuses sampling parameters, for training and evaluation alike, that the engine ignores under speculation."""
    adaptive = not args.repeats_seeds
    check_sampling_parameters({"min_p": args.min_p}, "in the config", adaptive)
    check_sampling_parameters(args.generation_kwargs or {}, "in `generation_kwargs`", adaptive)
