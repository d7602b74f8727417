"""What must happen in a process before vLLM builds an engine in it."""

import os

from . import cpu
from .contract import check_vllm_version, require


def prepare_vllm() -> None:
    """
    Checks the version, repairs the CPU backend, and makes the choices that an engine cannot change later.

    May run more than once.

    Raises:
        [`UnsupportedEngineError`]: If the installed vLLM was not tested.
    """
    check_vllm_version()
    cpu.register()  # the plugin entry point does it too, but only for an installed package
    choose_model_runner()
    keep_drafter_head()


def choose_model_runner() -> None:
    """
    Chooses vLLM's V1 model runner, the one that this package drives.

    vLLM takes the V2 runner by default where Triton works, that is on CUDA. Who has set the variable is not overruled:
    taking over the engine then fails with a message that names the variable.
    """
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def keep_drafter_head() -> None:
    """
    Keeps vLLM from giving the drafter the policy's own `lm_head`.

    vLLM shares the head where the two are equal when the engine starts, and a drafter made from its policy starts with
    a copy of it. Every later push of the drafter would then overwrite the policy's head (and, where it is tied, its
    embedding) and the engine would sample from another policy. On CPU packed heads are empty tensors, which are always
    equal.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    original = require(SpecDecodeBaseProposer, "_maybe_share_lm_head")
    if original.__name__ == "share_missing_lm_head":
        return

    def share_missing_lm_head(proposer, target_language_model):
        if not proposer.model.has_own_lm_head:
            original(proposer, target_language_model)

    SpecDecodeBaseProposer._maybe_share_lm_head = share_missing_lm_head
