"""Can this run speculate? Asked when the policy is loaded, before an engine is built."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model
from peft import PeftModel
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..drafter.configuration_drafter import SUPPORTED_POLICY_TYPES
from ..drafter.initialization import inner_language_model
from ..vllm_internals.contract import (
    UnsupportedEngineError,
    no_auxiliary_states_message,
    supports_eagle3,
    why_vllm_is_unsupported,
)
from .sampling_parameters import why_config_is_inexact


if TYPE_CHECKING:
    from ..tlt_grpo_config import TLTGRPOConfig


def why_unsupported(args: "TLTGRPOConfig", policy: PreTrainedModel | PeftModel) -> str | None:
    """
    What keeps a run from speculating, in a script that TRL's trainer runs.

    Args:
        args ([`TLTGRPOConfig`]):
            Configuration of the run.
        policy ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The policy as TRL has loaded it.

    Returns:
        `str` or `None`: The reason and what would bring speculation back, in words; `None` when nothing does.
    """
    return why_vllm_is_unsupported() or why_config_is_inexact(args) or why_policy_is_unsupported(policy)


def why_policy_is_unsupported(policy: PreTrainedModel | PeftModel) -> str | None:
    """As [`why_unsupported`], what lies in the policy alone."""
    if policy.config.to_dict().get("quantization_config") is not None:
        return (
            "The policy is quantised (`quantization_config`), and neither a drafter nor the weight sync with "
            "read-back can work with packed weights. Load it unquantised to speculate; LoRA works."
        )
    architectures = policy.config.architectures or [type(inner_language_model(policy)).__name__]
    return why_type_is_unsupported(policy.config, architectures) or _why_head_is_unsupported(policy)


def why_type_is_unsupported(config: PretrainedConfig, architectures: Sequence[str]) -> str | None:
    """As [`why_unsupported`], what the configuration of a policy tells."""
    if not supports_eagle3(architectures):
        return no_auxiliary_states_message(architectures)
    if config.model_type not in SUPPORTED_POLICY_TYPES:
        return (
            f"No drafter was tried for policies of model_type={config.model_type!r}; those of "
            f"{', '.join(SUPPORTED_POLICY_TYPES)} can have one."
        )
    return None


def _why_head_is_unsupported(policy: PreTrainedModel | PeftModel) -> str | None:
    """vLLM ties the head to the embedding where the configuration says so, whatever the policy has become since."""
    base = policy.get_base_model() if is_peft_model(policy) else policy
    if not base.config.get_text_config().tie_word_embeddings:
        return None
    head, embedding = base.get_output_embeddings().weight, base.get_input_embeddings().weight
    if head is embedding:
        return None
    return (
        "The policy's head and embedding are tied in its configuration (`tie_word_embeddings`), but training has been "
        "given a copy of one of them, as `modules_to_save` makes it. vLLM ties them, so it would sample with another "
        "head than the one that is trained; plain TRL does so too. Take 'lm_head' and 'embed_tokens' out of "
        "`modules_to_save`, or save the policy untied (`tie_word_embeddings=False`, with a head of its own) and train "
        "that."
    )


def check_embedding_rows(policy: PreTrainedModel | PeftModel, trust_remote_code: bool = False) -> None:
    """Raises a `ValueError` unless policy and checkpoint have the same vocabulary size: vLLM builds the latter's."""
    name = policy.name_or_path
    saved = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).get_text_config().vocab_size
    in_memory = policy.config.get_text_config().vocab_size
    if saved != in_memory:
        raise ValueError(
            f"The policy's embedding has {in_memory} rows, but vLLM builds its engine from {name}, whose embedding "
            f"has {saved}. Was `resize_token_embeddings` called on the loaded model? Save the resized model and its "
            "tokenizer with `save_pretrained`, and pass that folder to the trainer."
        )


def check_model_class(engine_kwargs: Mapping[str, Any]) -> None:
    """
    Raises an [`UnsupportedEngineError`] for vLLM's Transformers backend.

    It decorates the class of the policy itself, so that from then on the trainer's own copy raises `AttributeError:
    'do_not_compile'` in its forward pass (vLLM 0.31; TRL's GRPOTrainer ends the same way).
    """
    if engine_kwargs.get("model_impl") == "transformers":
        raise UnsupportedEngineError(
            "vLLM's Transformers backend (`vllm_model_impl='transformers'`) changes the policy's own class, so that "
            "the trainer's copy of the policy cannot run in the same process. Use `vllm_model_impl='vllm'`, or "
            "`vllm_mode='server'`, which runs without speculation."
        )
