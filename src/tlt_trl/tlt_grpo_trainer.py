import functools
import logging
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate.utils import is_peft_model
from huggingface_hub import CommitInfo
from tqdm.auto import tqdm
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer

from . import upstream
from .drafter.modeling_drafter import Drafter
from .drafter.training_state import newest_whole_checkpoint
from .drafter_saving import DrafterKeeper
from .generation.finite_policy import naming_the_step
from .generation.plain_generation import INACTIVE, build_generation, speculates
from .inactive_drafter import InactiveOnlineDrafter
from .online_drafter import OnlineDrafter, online_drafter_for
from .sample_reallocation import NoReallocation, SampleReallocation, reallocation_for
from .telemetry.callbacks import OptimizerStepInterval
from .telemetry.reduce import sum_over_ranks
from .telemetry.timeline import POLICY_TRAINING, ROLLOUT, SCORING, NoTimeline, Timeline
from .tlt_grpo_config import TLTGRPOConfig


logger = logging.getLogger(__name__)


class TLTGRPOTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] whose colocated vLLM engine decodes speculatively, with a drafter that follows the policy.

    A drop-in replacement: the arguments are those of [`~trl.GRPOTrainer`], in the same order, and a plain
    [`~trl.GRPOConfig`] is accepted. The completions are distributed exactly as the policy's, whatever the drafter is
    worth. With `use_vllm=False` or `vllm_mode="server"`, and where a run cannot speculate and stay exact
    (`args.speculation_on_unsupported`), it is TRL's trainer, and says so at start-up.

    The method was introduced in [Taming the Long-Tail: Efficient Reasoning RL Training with Adaptive
    Drafter](https://huggingface.co/papers/2511.16665), the choice of the strategy also in [RLHFSpec: Breaking the
    Efficiency Bottleneck in RLHF Training via Adaptive Drafting](https://huggingface.co/papers/2512.04752).

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, ...:
            As for [`~trl.GRPOTrainer`].
        drafter ([`Drafter`], *optional*):
            Drafter to start from, in place of `args.drafter_model_name_or_path`.

    `examples/minimal.py` is a whole script.
    """

    _tag_names = ["trl", "grpo", "tlt"]
    _name = "TLT"
    _paper = {
        "title": "Taming the Long-Tail: Efficient Reasoning RL Training with Adaptive Drafter",
        "id": "2511.16665",
    }

    # What a trainer has that TRL's own tests make without calling `__init__`.
    speculative = False
    online_drafter: OnlineDrafter | InactiveOnlineDrafter = InactiveOnlineDrafter()
    reallocation: SampleReallocation | NoReallocation = NoReallocation()
    timeline: Timeline | NoTimeline = NoTimeline()

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
            name = model if isinstance(model, str) else model.config.name_or_path
            args = TLTGRPOConfig(f"{name.split('/')[-1]}-TLT")
        args = TLTGRPOConfig.from_grpo_config(args)
        self.speculative = args.use_vllm and args.vllm_mode == "colocate"
        self.online_drafter = InactiveOnlineDrafter()  # not the class's, which would count for all trainers together
        if self.speculative:
            generation = functools.partial(build_generation, args=args, drafter=drafter, train_dataset=train_dataset)
        else:
            logger.warning(INACTIVE)
        with upstream.replaced_vllm_generation(generation) if self.speculative else nullcontext():
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        # Only the loaded policy tells whether a drafter can be had for it.
        self.speculative = self.speculative and speculates(self.vllm_generation)
        if args.log_timeline:
            self.timeline = Timeline.of_run(args.output_dir, self.accelerator)
            self.add_callback(OptimizerStepInterval(self.timeline))
        if self.speculative:
            self._keep_and_train_drafter()

    def _keep_and_train_drafter(self) -> None:
        generation = self.vllm_generation
        generation.timeline = self.timeline
        has_turns = bool(self.tools or self.environments or self.rollout_func)
        self.reallocation = reallocation_for(self.args, self.accelerator, generation, has_turns)
        if self.args.drafter_training:
            self.online_drafter = online_drafter_for(
                self.args,
                self.accelerator,
                generation,
                self.accelerator.unwrap_model(self.model),
                has_reward_model=any(isinstance(reward, torch.nn.Module) for reward in self.reward_funcs),
                guests=self.reallocation if isinstance(self.reallocation, SampleReallocation) else None,
            )
        self._keeper = DrafterKeeper(
            generation.drafter,
            self.args,
            self.accelerator,
            self.online_drafter,
            generation.rollout_loop.selector,
            generation.alarms,
            policy_config=(self.model.get_base_model() if is_peft_model(self.model) else self.model).config,
            policy_hub_id=lambda: self.hub_model_id,
            state=lambda: self.state,
        )

    @property
    def drafter(self) -> Drafter | None:
        """The drafter; `None` without speculation."""
        return self.vllm_generation.drafter if self.speculative else None

    # ---- the run ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        if self.accelerator.use_distributed and not is_sharded:
            upstream.undo_preparation_for_evaluation(self.model)
        if not self.speculative:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        self._keeper.start_run()
        self.online_drafter.start_run()
        if resume_from_checkpoint is True:
            # transformers takes the newest checkpoint, whole or not, and raises where there is none.
            resume_from_checkpoint = newest_whole_checkpoint(self.args.output_dir) or True
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        # The drafter is what a run leaves behind beside the policy, also where nobody calls `save_model`.
        self._keeper.finish()
        return output

    def evaluate(self, *args, **kwargs):
        with self.online_drafter.evaluating():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args, **kwargs):
        with self.online_drafter.evaluating():
            return super().predict(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        self.timeline.step = self.state.global_step
        with self.timeline.interval(POLICY_TRAINING):
            return super().training_step(*args, **kwargs)

    # ---- rollouts --------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list):
        with self.timeline.interval(ROLLOUT), naming_the_step(self.state):
            return self._generate_speculatively(prompts) if self.speculative else super()._generate(prompts)

    def _generate_speculatively(self, prompts: list):
        mode = "train" if self.model.training else "eval"
        self.vllm_generation.rollout_loop.temperatures.clear()  # what others have asked of the engine is not learnt
        if not self.vllm_generation.holds_policy():
            self._last_loaded_step = -1  # TRL syncs when the step number differs; other things change weights too
        if mode == "train":
            self.online_drafter.start_rollout(self.state.global_step)
            train = self.online_drafter.train_after_rollout
            with self.reallocation.rollout(), upstream.before_first_gather(self.accelerator, train):
                output = super()._generate(prompts)
        else:
            output = super()._generate(prompts)
        metrics, summary = self.vllm_generation.pop_metrics(is_training=mode == "train")
        if mode == "train":
            metrics |= self.reallocation.pop_metrics(functools.partial(sum_over_ranks, self.accelerator))
            self.online_drafter.note_rollout(metrics)
            self._tell(summary)
        self._append_metrics(mode, metrics)
        return output

    def _generate_single_turn(self, *args, **kwargs):
        # Between the turns of a tool loop the engine has the accelerator to itself.
        with self.online_drafter.paused():
            output = super()._generate_single_turn(*args, **kwargs)
        if self.speculative:
            self.vllm_generation.drafter_lag.note_rollout(self.state.global_step)
        return output

    def _tool_call_loop(self, *args, **kwargs):
        with self._drafter_in_background():
            return super()._tool_call_loop(*args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        with self._drafter_in_background():
            return super()._calculate_rewards(*args, **kwargs)

    def _drafter_in_background(self) -> AbstractContextManager[None]:
        return self.online_drafter.in_background() if self.speculative and self.model.training else nullcontext()

    def _tell(self, line: str) -> None:
        if line and self.accelerator.is_main_process:
            (logger.info if self.args.disable_tqdm else tqdm.write)(line)

    def _append_metrics(self, mode: str, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    # ---- features --------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs):
        is_training = self.speculative and self.model.training
        self.online_drafter.start_scoring(is_training)
        with self.timeline.interval(SCORING):
            output = super()._generate_and_score_completions(inputs)
        if is_training:
            self._append_metrics("train", self.online_drafter.pop_metrics() | self.vllm_generation.alarms.metrics())
            self._tell(self.online_drafter.describe())
        return output

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        recording = nullcontext()
        if self.speculative:
            prompt_length, step = input_ids.size(1) - logits_to_keep, self.state.global_step
            recording = self.online_drafter.recording(input_ids, attention_mask, prompt_length, step, self._step)
        with recording:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )

    # ---- saving ----------------------------------------------------------------------------------------------------

    def save_drafter(self, output_dir: str | None = None) -> str:
        """
        Saves the drafter and a model card in the EAGLE-3 layout that vLLM and SGLang load as it is. Any rank may call
        it; one writes. Returns the folder, by default `drafter` inside `args.output_dir`.
        """
        return self._keeper.save(output_dir)

    def push_drafter_to_hub(
        self,
        repo_id: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
    ) -> CommitInfo | None:
        """
        Pushes the drafter as it is now to a repository of its own, and waits for it. Any rank may call it; one pushes,
        and gets the commit. Arguments that are not given are `args.drafter_hub_model_id` and `args.hub_*`.

        Raises:
            Whatever the Hub's client raises: only the pushes of `args.drafter_push_to_hub` are reported instead.
        """
        return self._keeper.push(repo_id, private, revision, token) if self.is_world_process_zero() else None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        super().save_model(output_dir, _internal_call)
        # An internal call with a folder is a checkpoint, which gets its drafter in `_save_checkpoint`.
        if self.speculative and not (_internal_call and output_dir is not None):
            self._keeper.save_beside_policy(self.args.output_dir if output_dir is None else output_dir)

    def push_to_hub(self, *args, **kwargs):
        with upstream.uploads_through(self._keeper.upload_with_policy) if self.speculative else nullcontext():
            return super().push_to_hub(*args, **kwargs)

    def _save_checkpoint(self, model, trial):
        if not self.speculative:
            return super()._save_checkpoint(model, trial)
        keeper, output_dir = self._keeper, self._get_output_dir(trial=trial)
        folder = os.path.join(output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        # Nor must a slow disk earn the drafter time.
        with self.online_drafter.evaluating(), keeper.checkpoint(folder), upstream.without_rotation_and_push(self):
            super()._save_checkpoint(model, trial)
        keeper.push_checkpoint(folder, self._push_from_checkpoint)

    def _finalize_training(self, *args, **kwargs):
        # transformers loads the best checkpoint in there and deletes others: none may still be on its way.
        if self.speculative:
            self._keeper.join()
        return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self):
        super()._load_best_model()
        if self.speculative:
            self._keeper.load_best(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.speculative and checkpoint is not None:
            self._keeper.load_checkpoint(checkpoint)


# For several processes on CPU, without which a run could not be resumed.
upstream.allow_loading_to_numbered_cpu()
