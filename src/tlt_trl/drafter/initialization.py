"""Start a drafter from the weights of its policy, so that it is useful before it has seen much data."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .configuration_drafter import DrafterConfig


# Read in addition to the last layer. The first layer's norm is the one that the policy learned for embeddings.
FIRST_NORM, FINAL_NORM = NORMS = ("layers.0.input_layernorm.weight", "norm.weight")


def inner_language_model(policy: nn.Module) -> PreTrainedModel:
    """The Hugging Face model inside PEFT, DDP or FSDP wrappers."""
    for module in policy.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"No transformers model was found inside a policy of type {type(policy).__name__}.")


def parameters_to_read(policy: nn.Module) -> list[nn.Parameter]:
    """Policy parameters that [`drafter_from_policy`] reads. Back ends that shard parameters must gather them first."""
    model = inner_language_model(policy)
    decoder = model.get_decoder()
    last = f"layers.{model.config.num_hidden_layers - 1}."
    read = [weight for name, weight in decoder.named_parameters() if name.startswith((last, *NORMS))]
    return [*read, model.get_output_embeddings().weight]


def drafter_from_policy(
    drafter_class: type,
    policy: nn.Module,
    draft_token_ids: Tensor | None,
    layer_ids: Sequence[int] | None,
    head: str,
) -> PreTrainedModel:
    """See [`Drafter.from_policy`]."""
    model = inner_language_model(policy)
    draft_vocab_size = None if draft_token_ids is None else len(draft_token_ids)
    config = DrafterConfig.from_policy_config(model.config, draft_vocab_size, layer_ids, head)
    config.dtype = torch.float32
    # The constructors of nn.Linear draw random numbers; the policy's trajectory must not depend on the drafter.
    with torch.random.fork_rng(devices=[]):
        drafter = drafter_class(config, None if draft_token_ids is None else draft_token_ids.cpu())
    with torch.no_grad():
        _copy_policy_weights(drafter, model)
    return drafter


def _copy_policy_weights(drafter: PreTrainedModel, model: PreTrainedModel) -> None:
    decoder = model.get_decoder()
    # LoRA keeps the wrapped weight under `base_layer`.
    weights = {name.replace(".base_layer", ""): weight for name, weight in decoder.named_parameters()}
    last = f"layers.{model.config.num_hidden_layers - 1}."

    # Pass the last auxiliary state through. The other two start at zero and are learned.
    hidden_size = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden_size:].copy_(torch.eye(hidden_size))

    attention = drafter.midlayer.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = attention.get_submodule(name)
        projection.weight.zero_()  # the embedding half starts silent
        projection.weight[:, hidden_size:].copy_(weights[f"{last}self_attn.{name}.weight"])
        if projection.bias is not None:
            projection.bias.copy_(weights[f"{last}self_attn.{name}.bias"])
    attention.o_proj.weight.copy_(weights[f"{last}self_attn.o_proj.weight"])
    if attention.o_proj.bias is not None:
        # Qwen2 has a bias on q, k, v only.
        bias = weights.get(f"{last}self_attn.o_proj.bias")
        attention.o_proj.bias.zero_() if bias is None else attention.o_proj.bias.copy_(bias)

    for name in ("gate_proj", "up_proj", "down_proj"):
        drafter.midlayer.mlp.get_submodule(name).weight.copy_(weights[f"{last}mlp.{name}.weight"])
    drafter.midlayer.hidden_norm.weight.copy_(weights[f"{last}input_layernorm.weight"])
    drafter.midlayer.post_attention_layernorm.weight.copy_(weights[f"{last}post_attention_layernorm.weight"])
    drafter.midlayer.input_layernorm.weight.copy_(weights[FIRST_NORM])
    drafter.norm.weight.copy_(weights[FINAL_NORM])
    drafter.copy_head(model.get_output_embeddings().weight)
