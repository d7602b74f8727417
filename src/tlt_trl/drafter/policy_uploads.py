"""What transformers' trainer pushes to the policy's repository: neither the drafter's buffers nor secrets."""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo

from .privacy import SecretsFoundError, refuse_secrets
from .training_state import BUFFER_FILES


logger = logging.getLogger(__name__)

# Set to 1 it puts the buffers into pushed checkpoints.
PUSH_BUFFER_VARIABLE = "TLT_TRL_PUSH_FEATURE_BUFFER"
# transformers writes its arguments to it with `torch.save`, `hub_token` included.
TRAINING_ARGUMENTS = "training_args.bin"


class PolicyUploads:
    """
    Uploads folders in the place of `HfApi.upload_folder`.

    The feature buffer of a checkpoint, which holds prompts and answers as token ids, is left out unless the
    environment variable `TLT_TRL_PUSH_FEATURE_BUFFER` is 1; so is a pickle that holds the token of the Hub.

    Args:
        hub_token (`str`, *optional*):
            Token in the trainer's arguments.
    """

    def __init__(self, hub_token: str | None):
        self._hub_token = hub_token
        self._has_said = False

    def __call__(
        self,
        upload_folder: Callable[..., Any],
        *,
        folder_path: str | os.PathLike,
        ignore_patterns: Sequence[str] | None = None,
        run_as_future: bool = False,
        **kwargs: Any,
    ) -> CommitInfo | Future:
        """
        Raises:
            [`SecretsFoundError`]: If a text file holds what looks like a secret. With `run_as_future`, as during
                training, it is logged instead and the future holds it.
        """
        ignored = [*(ignore_patterns or ()), *self._left_out(Path(folder_path))]
        try:
            refuse_secrets(folder_path, ignored, {"`hub_token`": self._hub_token})
        except SecretsFoundError as error:
            if not run_as_future:
                raise
            logger.error("%s Training goes on.", error)
            refused: Future = Future()
            refused.set_exception(error)
            return refused
        return upload_folder(folder_path=folder_path, ignore_patterns=ignored, run_as_future=run_as_future, **kwargs)

    def _left_out(self, folder: Path) -> list[str]:
        left_out = [] if self._hub_token is None else [TRAINING_ARGUMENTS]
        if os.environ.get(PUSH_BUFFER_VARIABLE) == "1":
            return left_out
        if not self._has_said and any(folder.glob(BUFFER_FILES)):
            self._has_said = True
            logger.warning(
                "The feature buffer, which holds prompts and answers as token ids, is left out of pushed checkpoints: "
                "a run that resumes from one begins with an empty buffer. %s=1 puts it in.",
                PUSH_BUFFER_VARIABLE,
            )
        return [*left_out, BUFFER_FILES]
