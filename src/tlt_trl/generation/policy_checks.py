"""Is this policy one that can be rolled out with a drafter? Asked before an engine is built."""

from collections.abc import Mapping
from typing import Any

from peft import PeftModel
from transformers import AutoConfig, PreTrainedModel

from ..drafter.initialization import inner_language_model
from ..vllm_internals.contract import UnsupportedEngineError, no_auxiliary_states_message, supports_eagle3


def check_policy(policy: PreTrainedModel | PeftModel, trust_remote_code: bool = False) -> None:
    """
    Raises:
        [`UnsupportedEngineError`]: If vLLM gives away no hidden states of policies of this class.
        `ValueError`: If the policy is quantised, or has another embedding than the checkpoint it was loaded from.
    """
    check_not_quantized(policy)
    architectures = policy.config.architectures or [type(inner_language_model(policy)).__name__]
    if not supports_eagle3(architectures):
        raise UnsupportedEngineError(no_auxiliary_states_message(architectures))
    check_embedding_rows(policy, trust_remote_code)


def check_not_quantized(policy: PreTrainedModel | PeftModel) -> None:
    """Raises a `ValueError` for a quantised policy."""
    if policy.config.to_dict().get("quantization_config") is not None:
        raise ValueError(
            "The policy is quantised (`quantization_config`); neither a drafter nor the weight sync with read-back "
            "can work with packed weights. Load it unquantised (LoRA works), or use TRL's GRPOTrainer."
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
