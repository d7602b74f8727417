"""What a trainer does to keep its drafter: saving, checkpoints, resuming, the Hub."""

import functools
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from huggingface_hub import CommitInfo
from transformers import trainer as transformers_trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, rotate_checkpoints

from .drafter.checkpoint import PROVENANCE_NAME, DrafterSnapshot, run_facts
from .drafter.hub import BackgroundPusher, acceptance_history, positions, push_snapshot, write_model_card
from .drafter.modeling_drafter import Drafter
from .drafter.training_state import (
    FOLDER_NAME,
    CheckpointWriter,
    cpu_copy,
    load_training_state,
    newest_whole_checkpoint,
    what_is_missing,
)


logger = logging.getLogger(__name__)

# transformers loads the policy's optimiser to `args.device`. For several processes on CPU that is "cpu:0", a location
# that torch can save to and does not know when it loads.
torch.serialization.register_package(
    priority=11,
    tagger=lambda storage: None,
    deserializer=lambda storage, location: storage if location.startswith("cpu:") else None,
)


class DrafterSaving:
    """
    The part of [`TLTGRPOTrainer`] that saves, loads and pushes its drafter, wherever transformers does so with the
    policy. It stands before [`~trl.GRPOTrainer`] among the bases.
    """

    _best_provenance: dict | None = None  # of the best checkpoint, once it is loaded

    def save_drafter(self, output_dir: str | None = None) -> str:
        """
        Saves the drafter and a model card in the EAGLE-3 layout that vLLM and SGLang load as it is. Any rank may call
        it; one writes.

        Args:
            output_dir (`str`, *optional*):
                Folder to write to. Defaults to `drafter` inside `args.output_dir`.

        Returns:
            `str`: The folder.
        """
        output_dir = os.path.join(self.args.output_dir, FOLDER_NAME) if output_dir is None else output_dir
        if self.args.should_save:
            provenance = self._provenance()
            self.drafter.save_pretrained(output_dir, provenance=provenance)
            name = self._drafter_repo_id if self.args.drafter_push_to_hub else output_dir
            write_model_card(output_dir, name, self.drafter.config, provenance, self._acceptance_history())
        return output_dir

    def push_drafter_to_hub(
        self,
        repo_id: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
    ) -> CommitInfo | None:
        """
        Pushes the drafter as it is now to a repository of its own, and waits for it. Any rank may call it; one pushes.

        Args:
            repo_id (`str`, *optional*):
                Repository, made when missing. Defaults to `args.drafter_hub_model_id`.
            private (`bool`, *optional*):
                Visibility of a new repository. Defaults to `args.hub_private_repo`.
            revision (`str`, *optional*):
                Branch to commit to. Defaults to `args.hub_revision`.
            token (`str`, *optional*):
                Token with the right to write. Defaults to `args.hub_token`.

        Returns:
            [`~huggingface_hub.CommitInfo`]: The commit; `None` on the ranks that push nothing.

        Raises:
            Whatever the Hub's client raises: only the pushes of `args.drafter_push_to_hub` are reported instead.
        """
        if not self.is_world_process_zero():
            return None
        args = self.args
        repo_id = self._drafter_repo_id if repo_id is None else repo_id
        self._drafter_pusher.join()
        return push_snapshot(
            DrafterSnapshot.of(self.drafter),
            repo_id,
            self._provenance(),
            self._acceptance_history(),
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision if revision is None else revision,
            token=args.hub_token if token is None else token,
            commit_message=f"Drafter at step {self.state.global_step}",
        )

    @property
    def _drafter_repo_id(self) -> str:
        args = self.args
        if args.drafter_hub_model_id is not None:
            return args.drafter_hub_model_id
        policy = Path(args.output_dir).absolute().name if args.hub_model_id is None else args.hub_model_id
        return f"{policy}-drafter"

    @functools.cached_property
    def _drafter_pusher(self) -> BackgroundPusher:
        args = self.args
        return BackgroundPusher(
            self._drafter_repo_id, args.hub_private_repo, args.hub_revision, args.hub_token, args.hub_always_push
        )

    @functools.cached_property
    def _checkpoint_writer(self) -> CheckpointWriter:
        rank = self.accelerator.process_index
        ranks = range(self.accelerator.num_processes)
        if self.args.save_on_each_node:
            first = rank - self.accelerator.local_process_index
            ranks = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
        return CheckpointWriter(rank, ranks)

    def _provenance(self) -> dict:
        """What the drafter was trained from, for `provenance.json` and the model card."""
        if self._best_provenance is not None:
            return self._best_provenance
        policy = self.model.config
        facts = {
            # A policy that is pushed is the one the drafter fits, not the one the run began with. Only the first rank,
            # which does the pushing, knows its repository.
            "policy": self.hub_model_id or policy._name_or_path,
            "policy_trained_from": policy._name_or_path,
            "policy_revision": policy._commit_hash,
            "policy_steps": self.state.global_step,
            "drafter_steps": self.drafter_trainer.steps if self.drafter_trainer is not None else 0,
            "tokens_trained": self._drafter_tokens,
        }
        history = self._acceptance_history()
        if history:
            last = history[-1]
            by_position = [last[name] for name in positions([last])]
            facts |= {"acceptance_length": last["acceptance_length"], "acceptance_by_position": by_position}
        return run_facts() | facts

    def _acceptance_history(self) -> list[dict[str, float]]:
        return acceptance_history(self.state.log_history)

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        self._best_provenance = None
        if self.speculative and resume_from_checkpoint is True:
            # transformers takes the newest checkpoint, whole or not, and raises where there is none.
            resume_from_checkpoint = newest_whole_checkpoint(self.args.output_dir) or True
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        if self.drafter is not None:
            # The drafter is what a run leaves behind beside the policy, also where nobody calls `save_model`.
            folder = self.save_drafter()
            if self.args.drafter_push_to_hub:
                self._drafter_pusher.join()
                self._begin_drafter_push(folder, "End of training")
                self._drafter_pusher.join()
        return output

    def _begin_drafter_push(self, local_copy: str, commit_message: str) -> None:
        if not self.is_world_process_zero() or not self._drafter_pusher.accepts:
            return
        self._drafter_pusher.push(
            DrafterSnapshot.of(self.drafter),
            self._provenance(),
            self._acceptance_history(),
            commit_message,
            local_copy,
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False):
        super().save_model(output_dir, _internal_call)
        # An internal call with a folder is a checkpoint, which gets its drafter in `_save_checkpoint`.
        if self.drafter is not None and not (_internal_call and output_dir is not None):
            self.save_drafter(os.path.join(self.args.output_dir if output_dir is None else output_dir, FOLDER_NAME))

    def _save_checkpoint(self, model, trial):
        if self.drafter is None:
            return super()._save_checkpoint(model, trial)
        run_dir = self._get_output_dir(trial=trial)
        folder = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}", FOLDER_NAME)
        self._checkpoint_writer.join()
        if self.args.should_save:
            # Before the policy: from here on the checkpoint counts as torn until its drafter is whole.
            self._checkpoint_writer.clear(folder)
        args = self.args
        with self._without_rotation_and_push():
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        self._start_drafter_checkpoint(folder, run_dir)
        if args.push_to_hub:
            if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
                self._checkpoint_writer.join()
                self.accelerator.wait_for_everyone()  # the first rank pushes the files of all
            self._push_from_checkpoint(os.path.dirname(folder))
        if args.drafter_push_to_hub and args.hub_strategy != HubStrategy.END:
            self._begin_drafter_push(folder, f"Training in progress, step {self.state.global_step}")

    @contextmanager
    def _without_rotation_and_push(self) -> Iterator[None]:
        """
        Older checkpoints go, and the new one is pushed, when its drafter is there. `Trainer._save_checkpoint` does it
        before and offers no hook, so the two names are replaced for the time of the call only.
        """
        rotate = transformers_trainer.rotate_checkpoints
        transformers_trainer.rotate_checkpoints = lambda **kwargs: None
        self._push_from_checkpoint = lambda folder: None
        try:
            yield
        finally:
            transformers_trainer.rotate_checkpoints = rotate
            del self._push_from_checkpoint

    def _start_drafter_checkpoint(self, folder: str, run_dir: str) -> None:
        """Copies what changes and leaves the writing to the background."""
        rank_state = None if self.args.save_only_model else self._rank_state()
        if rank_state is not None and not os.path.isdir(folder):
            raise FileNotFoundError(
                f"Rank {self.accelerator.process_index} does not see {folder}, which the first rank has made: their "
                "machines share no file system. Set `save_on_each_node=True`, or an `output_dir` that all of them see."
            )
        if not self.args.should_save:
            return self._checkpoint_writer.start(folder, rank_state)
        rotate = None
        if self.args.save_total_limit is not None:
            rotate = functools.partial(
                rotate_checkpoints,
                run_dir,
                self.args.save_total_limit,
                self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self._checkpoint_writer.start(folder, rank_state, DrafterSnapshot.of(self.drafter), self._provenance(), rotate)

    def _rank_state(self) -> dict:
        """What this rank needs beside the weights to go on as if it had not been interrupted."""
        state = {
            "selector": json.dumps(self.vllm_generation.rollout_loop.selector.state_dict()),
            "alarms": self.vllm_generation.alarms.state_dict(),
            "drafter_credit_s": self._drafter_credit_s,
            "drafter_tokens": self._drafter_tokens,
            # A clock starts anew with its process, so a time that has passed is saved and not a moment.
            "since_rollout_s": self._last_rollout_end_s and time.perf_counter() - self._last_rollout_end_s,
        }
        if self.drafter_trainer is not None:
            state |= {
                "trainer": cpu_copy(self.drafter_trainer.state_dict()),
                "buffer": self.feature_buffer.state_dict(),
            }
        return state

    def _finalize_training(self, *args, **kwargs):
        # transformers loads the best checkpoint in there and deletes others: none may still be on its way.
        if self.drafter is not None:
            self._checkpoint_writer.join()
            self.accelerator.wait_for_everyone()
        return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self):
        super()._load_best_model()
        folder = os.path.join(self.state.best_model_checkpoint, FOLDER_NAME)
        if self.drafter is not None and os.path.isdir(folder):
            self._load_drafter_weights(folder)
            # Drafter and policy are those of that checkpoint from here on, and so is what is told about them.
            self._best_provenance = json.loads(Path(folder, PROVENANCE_NAME).read_text())

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.drafter is None or checkpoint is None:
            return
        folder = os.path.join(checkpoint, FOLDER_NAME)
        if not os.path.isdir(folder):
            logger.warning("%s holds no drafter: going on with the one that this run began with.", checkpoint)
            return
        self._load_drafter_checkpoint(folder)

    def _load_drafter_checkpoint(self, folder: str) -> None:
        problem = what_is_missing(folder)
        if problem is not None:
            raise ValueError(
                f"The drafter of this checkpoint is not whole: {problem} Resume from an older checkpoint, or with "
                f"`resume_from_checkpoint=True`, which finds the newest whole one; or delete {folder} to go on with "
                "the drafter that this run began with."
            )
        self._load_drafter_weights(folder)
        writer = self._checkpoint_writer
        state = load_training_state(folder, writer.rank, writer.ranks)
        if state is None:
            return
        self.vllm_generation.alarms.load_state_dict(state["alarms"])
        self._drafter_credit_s = state["drafter_credit_s"]
        self._drafter_tokens = state["drafter_tokens"]
        if state["since_rollout_s"] is not None:
            self._last_rollout_end_s = time.perf_counter() - state["since_rollout_s"]
        if self.drafter_trainer is not None and "trainer" in state:
            self.drafter_trainer.load_state_dict(state["trainer"])
            self.feature_buffer.load_state_dict(state["buffer"])
        try:
            self.vllm_generation.rollout_loop.selector.load_state_dict(json.loads(state["selector"]))
        except ValueError as error:
            logger.warning("The selector begins anew, since this run chooses among other strategies: %s", error)

    def _load_drafter_weights(self, folder: str) -> None:
        base = self.model.get_base_model() if is_peft_model(self.model) else self.model
        # Weights and vocabulary mapping together: a mapping that was made anew would give the head other tokens.
        self.drafter.load_state_dict(Drafter.from_pretrained(folder, base.config).state_dict())
