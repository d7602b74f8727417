"""Configuration of the drafter: a `LlamaConfig` that vLLM and SGLang read as an EAGLE-3 head."""

from collections.abc import Sequence
from typing import Any

from transformers import LlamaConfig, PretrainedConfig


# Those of which an engine was run with a drafter (tests/matrix).
SUPPORTED_POLICY_TYPES = ("llama", "mistral", "qwen2", "qwen3")

HEADS = ("own", "policy")


def default_aux_layer_ids(num_hidden_layers: int) -> list[int]:
    """
    Policy layers whose inputs feed the drafter, EAGLE-3's {2, L // 2, L - 3} (arXiv 2503.01840).

    With fewer than seven layers these three coincide or lie outside the model, so {1, L // 2, L - 1} is used then.
    Duplicates are dropped because vLLM captures each layer once: `[1]` for two layers, `[1, 2]` for three.
    """
    if num_hidden_layers >= 7:
        return [2, num_hidden_layers // 2, num_hidden_layers - 3]
    candidates = {1, num_hidden_layers // 2, num_hidden_layers - 1}
    return sorted(layer for layer in candidates if 0 <= layer < num_hidden_layers)


class DrafterConfig(LlamaConfig):
    r"""
    Configuration of a one-layer EAGLE-3 drafter.

    It stays a `"llama"` configuration on disk, with the architecture name `LlamaForCausalLMEagle3`, because that is
    what the engines dispatch on.

    Args:
        draft_vocab_size (`int`, *optional*):
            Number of tokens the drafter can propose. `None` means all of `vocab_size`.
        eagle_aux_hidden_state_layer_ids (`list[int]`, *optional*):
            Policy layers whose *inputs* are fed to the drafter, strictly increasing (vLLM sorts and drops duplicates).
        num_aux_hidden_states (`int`, *optional*):
            Length of the list above. vLLM sizes `fc` by it and assumes 3 when it is absent.
        target_hidden_size (`int`, *optional*):
            Hidden size of the policy. Equal to `hidden_size`: the drafter shares the policy's embedding.
        target_num_hidden_layers (`int`, *optional*):
            Number of policy layers, kept so that a policy that does not fit is recognised.
        head (`str`, *optional*, defaults to `"own"`):
            `"own"`: trained with the drafter. `"policy"`: the policy's rows of the draft vocabulary, which follow the
            policy and are not trained.
        eagle_config (`dict`, *optional*):
            The same layer ids for SGLang, which counts layer *outputs* and therefore needs every id minus one.
    """

    draft_vocab_size: int | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    num_aux_hidden_states: int | None = None
    target_hidden_size: int | None = None
    target_num_hidden_layers: int | None = None
    head: str = "own"
    eagle_config: dict | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.architectures = ["LlamaForCausalLMEagle3"]
        if self.head not in HEADS:
            raise ValueError(f"head={self.head!r} must be one of {', '.join(map(repr, HEADS))}.")
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.eagle_aux_hidden_state_layer_ids is not None:
            self.num_aux_hidden_states = len(self.eagle_aux_hidden_state_layer_ids)
        elif self.num_aux_hidden_states is None:
            self.num_aux_hidden_states = 3

    def to_dict(self) -> dict[str, Any]:
        """Adds the rope keys of transformers 4: an engine that reads only those would otherwise use theta 10000."""
        config = super().to_dict()
        rope = dict(self.rope_parameters)
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
        return config

    @classmethod
    def from_policy_config(
        cls,
        policy_config: PretrainedConfig,
        draft_vocab_size: int | None = None,
        aux_hidden_state_layer_ids: Sequence[int] | None = None,
        head: str = "policy",
    ) -> "DrafterConfig":
        """
        Configuration of a drafter that fits a policy.

        Args:
            policy_config ([`~transformers.PretrainedConfig`]):
                Configuration of a policy of one of `SUPPORTED_POLICY_TYPES`.
            draft_vocab_size (`int`, *optional*):
                Size of the reduced vocabulary. `None` keeps the whole one.
            aux_hidden_state_layer_ids (`Sequence[int]`, *optional*):
                Policy layers to read. Defaults to [`default_aux_layer_ids`].
            head (`str`, *optional*, defaults to `"policy"`):
                `"own"` or `"policy"`. The latter learns faster, and has neither gradients nor optimiser state.
        """
        if policy_config.model_type not in SUPPORTED_POLICY_TYPES:
            raise ValueError(
                f"No drafter can be made for a policy of model_type={policy_config.model_type!r}. "
                f"Supported: {', '.join(SUPPORTED_POLICY_TYPES)}."
            )
        num_layers = policy_config.num_hidden_layers
        if aux_hidden_state_layer_ids is None:
            aux_hidden_state_layer_ids = default_aux_layer_ids(num_layers)
        layer_ids = checked_layer_ids(aux_hidden_state_layer_ids, num_layers)
        if draft_vocab_size is not None and not 1 <= draft_vocab_size <= policy_config.vocab_size:
            raise ValueError(
                f"draft_vocab_size={draft_vocab_size} must be between 1 and the policy's vocab_size="
                f"{policy_config.vocab_size}."
            )
        return cls(
            vocab_size=policy_config.vocab_size,
            draft_vocab_size=draft_vocab_size,
            hidden_size=policy_config.hidden_size,
            intermediate_size=policy_config.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=policy_config.num_attention_heads,
            num_key_value_heads=policy_config.num_key_value_heads,
            head_dim=policy_head_dim(policy_config),
            hidden_act="silu",  # the engines' EAGLE-3 layer has no other
            max_position_embeddings=policy_config.max_position_embeddings,
            rms_norm_eps=policy_config.rms_norm_eps,
            rope_parameters=dict(policy_config.rope_parameters),
            attention_bias=policy_has_attention_bias(policy_config),
            tie_word_embeddings=False,
            bos_token_id=policy_config.bos_token_id,
            eos_token_id=policy_config.eos_token_id,
            pad_token_id=policy_config.pad_token_id,
            eagle_aux_hidden_state_layer_ids=layer_ids,
            target_hidden_size=policy_config.hidden_size,
            target_num_hidden_layers=num_layers,
            head=head,
            eagle_config={
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layer_ids],
                "use_aux_hidden_state": True,
            },
        )


def checked_layer_ids(layer_ids: Sequence[int], num_hidden_layers: int) -> list[int]:
    """The ids as a list. `ValueError` unless they are strictly increasing and inside the policy."""
    layer_ids = list(layer_ids)
    increasing = all(low < high for low, high in zip(layer_ids, layer_ids[1:], strict=False))
    if not layer_ids or not increasing or layer_ids[0] < 0 or layer_ids[-1] >= num_hidden_layers:
        raise ValueError(
            f"aux_hidden_state_layer_ids={layer_ids} must be strictly increasing and between 0 and "
            f"{num_hidden_layers - 1} for a policy of {num_hidden_layers} layers, "
            f"for example {default_aux_layer_ids(num_hidden_layers)}."
        )
    return layer_ids


def policy_head_dim(policy_config: PretrainedConfig) -> int:
    """Qwen2 has no such field, Mistral may leave it empty; the others may set one that is not the quotient."""
    head_dim = policy_config.to_dict().get("head_dim")
    return policy_config.hidden_size // policy_config.num_attention_heads if head_dim is None else head_dim


def policy_has_attention_bias(policy_config: PretrainedConfig) -> bool:
    """Qwen2 always has a bias on q, k and v but no field that says so; Mistral has neither."""
    return policy_config.model_type == "qwen2" or policy_config.to_dict().get("attention_bias", False)
