"""Keeping the drafter of a run: saving, checkpoints, resuming, the Hub."""

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from huggingface_hub import CommitInfo
from transformers import PretrainedConfig, TrainerState
from transformers.trainer_utils import HubStrategy, rotate_checkpoints

from .drafter.checkpoint import PROVENANCE_NAME, DrafterSnapshot, run_facts
from .drafter.disk import size_bytes
from .drafter.hub import BackgroundPusher, acceptance_history, positions, push_snapshot, write_model_card
from .drafter.modeling_drafter import Drafter
from .drafter.policy_uploads import PolicyUploads
from .drafter.training_state import (
    BUFFER_KEY,
    FOLDER_NAME,
    CheckpointWriter,
    SaveFailure,
    load_training_state,
    newest_whole_drafter,
    policy_problem,
    what_is_missing,
)
from .inactive_drafter import InactiveOnlineDrafter
from .online_drafter import OnlineDrafter
from .strategy import Selector
from .telemetry.alarms import Alarms
from .telemetry.reduce import sum_over_ranks
from .tlt_grpo_config import TLTGRPOConfig
from .upstream import uploads_through


logger = logging.getLogger(__name__)


class DrafterKeeper:
    """
    Saves, loads and pushes the drafter wherever transformers does so with the policy.

    Args:
        drafter ([`Drafter`]):
            The drafter.
        args ([`TLTGRPOConfig`]):
            Where to save and push, and what.
        accelerator ([`~accelerate.Accelerator`]):
            Of the run.
        online ([`OnlineDrafter`]):
            What trains the drafter.
        selector ([`~tlt_trl.strategy.Selector`]), alarms ([`Alarms`]):
            What else of this rank is saved in a checkpoint.
        policy_config ([`~transformers.PretrainedConfig`]):
            Configuration of the policy, which a loaded drafter must fit.
        policy_hub_id (`Callable[[], str | None]`):
            Repository of the policy. Only the first rank, which does the pushing, knows it, and only once it is made.
        state (`Callable[[], TrainerState]`):
            State of the run.
    """

    def __init__(
        self,
        drafter: Drafter,
        args: TLTGRPOConfig,
        accelerator: Accelerator,
        online: OnlineDrafter | InactiveOnlineDrafter,
        selector: Selector,
        alarms: Alarms,
        policy_config: PretrainedConfig,
        policy_hub_id: Callable[[], str | None],
        state: Callable[[], TrainerState],
    ):
        self.drafter = drafter
        self._args = args
        self._accelerator = accelerator
        self._online = online
        self._selector = selector
        self._alarms = alarms
        self._policy_config = policy_config
        self._policy_hub_id = policy_hub_id
        self._state = state
        self._best_provenance: dict[str, Any] | None = None  # of the best checkpoint, once it is loaded
        self._pusher = BackgroundPusher(
            self.repo_id, args.hub_private_repo, args.hub_revision, args.hub_token, args.hub_always_push
        )
        self.upload_with_policy = PolicyUploads(args.hub_token)
        self._writer = CheckpointWriter(accelerator.process_index, self._ranks_of_folder(), self._note_saved)

    def _ranks_of_folder(self) -> range:
        """The processes that write to the same checkpoint folder."""
        accelerator = self._accelerator
        if not self._args.save_on_each_node:
            return range(accelerator.num_processes)
        first = accelerator.process_index - accelerator.local_process_index
        return range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))

    @property
    def repo_id(self) -> str:
        """Repository of the drafter on the Hub."""
        args = self._args
        if args.drafter_hub_model_id is not None:
            return args.drafter_hub_model_id
        policy = Path(args.output_dir).absolute().name if args.hub_model_id is None else args.hub_model_id
        return f"{policy}-drafter"

    def start_run(self) -> None:
        """Begins a run: what the best checkpoint of an earlier one was means nothing any more."""
        self._best_provenance = None

    def provenance(self) -> dict[str, Any]:
        """What the drafter was trained from, for `provenance.json` and the model card."""
        if self._best_provenance is not None:
            return self._best_provenance
        policy = self._policy_config
        facts = {
            # A policy that is pushed is the one the drafter fits, not the one the run began with.
            "policy": self._policy_hub_id() or policy.name_or_path,
            "policy_trained_from": policy.name_or_path,
            "policy_revision": policy._commit_hash,
            "policy_steps": self._state().global_step,
            "drafter_steps": self._online.steps,
            "tokens_trained": self._online.tokens_trained,
        }
        history = self._history()
        if history:
            last = history[-1]
            by_position = [last[name] for name in positions([last])]
            facts |= {"acceptance_length": last["acceptance_length"], "acceptance_by_position": by_position}
        return run_facts() | facts

    def _history(self) -> list[dict[str, float]]:
        return acceptance_history(self._state().log_history)

    # ---- saving and pushing ----------------------------------------------------------------------------------------

    def save(self, output_dir: str | None = None) -> str:
        """Saves drafter and model card, on the rank that saves, to `drafter` inside `args.output_dir` by default."""
        output_dir = os.path.join(self._args.output_dir, FOLDER_NAME) if output_dir is None else output_dir
        if self._args.should_save:
            provenance = self.provenance()
            self.drafter.save_pretrained(output_dir, provenance=provenance)
            name = self.repo_id if self._args.drafter_push_to_hub else output_dir
            write_model_card(output_dir, name, self.drafter.config, provenance, self._history())
        return output_dir

    def push(
        self,
        repo_id: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
    ) -> CommitInfo:
        """
        Pushes the drafter as it is now to a repository of its own, and waits for it.

        Args:
            repo_id (`str`, *optional*):
                Repository, made when missing. Defaults to `args.drafter_hub_model_id`.
            private (`bool`, *optional*):
                Visibility of a new repository. Defaults to `args.hub_private_repo`.
            revision (`str`, *optional*):
                Branch to commit to. Defaults to `args.hub_revision`.
            token (`str`, *optional*):
                Token with the right to write. Defaults to `args.hub_token`.
        """
        args = self._args
        self._pusher.join()
        return push_snapshot(
            DrafterSnapshot.of(self.drafter),
            self.repo_id if repo_id is None else repo_id,
            self.provenance(),
            self._history(),
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision if revision is None else revision,
            token=args.hub_token if token is None else token,
            commit_message=f"Drafter at step {self._state().global_step}",
        )

    def begin_push(self, local_copy: str, commit_message: str) -> None:
        """Pushes the drafter as it is now in the background, on the first rank and unless a push is on its way."""
        if not self._accelerator.is_main_process or not self._pusher.accepts:
            return
        snapshot = DrafterSnapshot.of(self.drafter)
        self._pusher.push(snapshot, self.provenance(), self._history(), commit_message, local_copy)

    def save_beside_policy(self, policy_dir: str) -> str:
        """[`save`] for whoever asked for the policy: where the drafter cannot be saved, an alarm says so."""
        output_dir = os.path.join(policy_dir, FOLDER_NAME)
        try:
            self.save(output_dir)
        except OSError as error:
            self._note_failure(output_dir, error)
        else:
            self._note_saved(None)
        return output_dir

    def _note_saved(self, failure: SaveFailure | None) -> None:
        self._alarms.set("drafter_not_saved", failure is not None, str(failure))

    def _note_failure(self, folder: str, error: OSError) -> None:
        self._note_saved(SaveFailure(Path(folder), size_bytes(self.drafter.state_dict()), error))

    def finish(self) -> None:
        """Saves what a run leaves behind and, where that is wanted, pushes it and waits for it."""
        folder = self.save_beside_policy(self._args.output_dir)
        if self._args.drafter_push_to_hub:
            self._pusher.join()
            self.begin_push(folder, "End of training")
            self._pusher.join()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Waits until the checkpoints of all ranks are written."""
        self._writer.join()
        self._accelerator.wait_for_everyone()

    def push_checkpoint(self, folder: str, push_policy: Callable[[str], None]) -> None:
        """Pushes a saved checkpoint as far as that is wanted: by `push_policy(folder)`, and the drafter by itself."""
        args = self._args
        if args.push_to_hub:
            if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
                self.join()  # the first rank pushes the files of all
            with uploads_through(self.upload_with_policy):
                push_policy(folder)
        if args.drafter_push_to_hub and args.hub_strategy != HubStrategy.END:
            message = f"Training in progress, step {self._state().global_step}"
            self.begin_push(os.path.join(folder, FOLDER_NAME), message)

    @contextmanager
    def checkpoint(self, folder: str) -> Iterator[None]:
        """
        The policy's checkpoint is saved inside; the drafter's part of it is written in the background from then on.

        Whatever keeps the drafter from being saved is an alarm and does not concern the policy.

        Args:
            folder (`str`):
                Folder of the checkpoint. Older ones beside it are deleted once this one is written.
        """
        args = self._args
        run_dir, folder = os.path.dirname(folder), os.path.join(folder, FOLDER_NAME)
        self._writer.join()
        if args.should_save:
            # Before the policy: from here on the checkpoint counts as torn until its policy is whole.
            self._try(self._writer.clear, folder)
        yield
        is_there = self._is_there_on_all_ranks(folder)
        if args.should_save:
            self._try(self._writer.note_policy_saved, folder)
        state = None if args.save_only_model or not is_there else self._state_of_rank()
        if not args.should_save:
            return self._writer.start(folder, state)
        rotate = None
        if args.save_total_limit is not None:
            best = self._state().best_model_checkpoint
            rotate = functools.partial(rotate_checkpoints, run_dir, args.save_total_limit, best, use_mtime=True)
        self._writer.start(folder, state, DrafterSnapshot.of(self.drafter), self.provenance(), rotate)

    def _try(self, action: Callable[[str], None], folder: str) -> None:
        try:
            action(folder)
        except OSError as error:
            self._note_failure(folder, error)

    def _is_there_on_all_ranks(self, folder: str) -> bool:
        """Whether every rank sees the folder that the first one has made, when all have saved the policy."""
        accelerator = self._accelerator
        accelerator.wait_for_everyone()
        is_there = os.path.isdir(folder)
        number = sum_over_ranks(accelerator, {"is_there": float(is_there)})["is_there"]
        if not is_there and not self._args.should_save:
            message = (
                f"Rank {accelerator.process_index} does not see it. If its machine shares no file system with the "
                "first rank's, set `save_on_each_node=True`, or an `output_dir` that all of them see"
            )
            self._note_failure(folder, FileNotFoundError(message))
        return number == accelerator.num_processes

    def _state_of_rank(self) -> dict[str, Any]:
        """What this rank needs beside the weights to go on as if it had not been interrupted."""
        online = self._online.state_dict()
        buffer = {BUFFER_KEY: online.pop(BUFFER_KEY)} if BUFFER_KEY in online else {}
        return {
            "selector": json.dumps(self._selector.state_dict()),
            "alarms": self._alarms.state_dict(),
            "online_drafter": online,
            **buffer,
        }

    def load_best(self, checkpoint: str) -> None:
        """Takes the drafter of the best checkpoint; what is told about it is what was known there."""
        folder = os.path.join(checkpoint, FOLDER_NAME)
        if not os.path.isdir(folder):
            return
        problem = what_is_missing(folder)
        if problem is not None:
            return logger.warning("The drafter stays as it is, not as it was in the best checkpoint: %s", problem)
        self._load_weights(folder)
        self._best_provenance = json.loads(Path(folder, PROVENANCE_NAME).read_text())

    def load_checkpoint(self, checkpoint: str) -> None:
        """
        Goes on with the drafter of a checkpoint and, where this rank's state was saved, with that. In place of a
        drafter that is not whole it takes that of an older checkpoint, or else keeps the one that this run began with.

        Raises:
            `ValueError`: If the policy's part of the checkpoint is not whole, or the drafter does not fit this run's.
        """
        if not os.path.isdir(os.path.join(checkpoint, FOLDER_NAME)):
            logger.warning("%s holds no drafter: going on with the one that this run began with.", checkpoint)
            return
        problem = policy_problem(checkpoint)
        if problem is not None:
            raise ValueError(
                f"This checkpoint is not whole: {problem} Resume from an older checkpoint, or with "
                "`resume_from_checkpoint=True`, which finds the newest whole one."
            )
        folder = newest_whole_drafter(checkpoint)
        if folder is None:
            logger.warning("Going on with the drafter that this run began with.")
            return
        self._load_weights(folder)
        state = load_training_state(folder, self._writer.rank, self._writer.ranks)
        if state is None:
            return
        self._alarms.load_state_dict(state["alarms"])
        if "trainer" in state["online_drafter"] and BUFFER_KEY not in state:
            logger.warning("%s holds no feature buffer, as after a push: it begins empty.", folder)
        buffer = {BUFFER_KEY: state[BUFFER_KEY]} if BUFFER_KEY in state else {}
        self._online.load_state_dict(state["online_drafter"] | buffer)
        try:
            self._selector.load_state_dict(json.loads(state["selector"]))
        except ValueError as error:
            logger.warning("The selector begins anew, since this run chooses among other strategies: %s", error)

    def _load_weights(self, folder: str) -> None:
        loaded = Drafter.from_pretrained(folder, self._policy_config)
        sizes = [drafter.config.draft_vocab_size for drafter in (loaded, self.drafter)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"The drafter in {folder} drafts over {sizes[0]} tokens, the one of this run over {sizes[1]}. Resume "
                f"with `drafter_vocab_size={sizes[0]}` (the policy's own for its whole vocabulary), or delete the "
                "folder to go on with the drafter that this run began with."
            )
        # Weights and vocabulary mapping together: a mapping that was made anew would give the head other tokens.
        self.drafter.load_state_dict(loaded.state_dict())
