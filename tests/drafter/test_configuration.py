import json

import pytest
from transformers import AutoConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tlt_trl.drafter import DrafterConfig
from tlt_trl.drafter.configuration_drafter import default_aux_layer_ids


@pytest.mark.parametrize(
    ("num_layers", "layer_ids"),
    [(1, [0]), (2, [1]), (3, [1, 2]), (4, [1, 2, 3]), (6, [1, 3, 5]), (7, [2, 3, 4]), (30, [2, 15, 27])],
)
def test_default_layers_are_distinct_and_inside_the_policy(num_layers, layer_ids):
    assert default_aux_layer_ids(num_layers) == layer_ids


def test_takes_shapes_and_rope_from_the_policy():
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    policy_config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=32, rope_parameters=rope,
                                tie_word_embeddings=True, rms_norm_eps=1e-5, max_position_embeddings=777)  # fmt: skip
    config = DrafterConfig.from_policy_config(policy_config, draft_vocab_size=100)
    assert (config.hidden_size, config.head_dim, config.rms_norm_eps) == (64, 32, 1e-5)
    assert (config.num_hidden_layers, config.draft_vocab_size, config.max_position_embeddings) == (1, 100, 777)
    assert config.rope_parameters == rope
    assert config.tie_word_embeddings is False


def test_scaled_rope_survives_the_file(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 77.0, "factor": 8.0}
    DrafterConfig.from_policy_config(LlamaConfig(rope_parameters=rope)).save_pretrained(tmp_path)
    assert DrafterConfig.from_pretrained(tmp_path).rope_parameters == rope
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == rope
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_attention_bias_follows_the_policy():
    assert DrafterConfig.from_policy_config(Qwen2Config()).attention_bias
    assert not DrafterConfig.from_policy_config(Qwen3Config()).attention_bias
    assert not DrafterConfig.from_policy_config(LlamaConfig()).attention_bias


def test_saved_file_is_what_the_engines_read(tmp_path):
    policy_config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1234.0})
    DrafterConfig.from_policy_config(policy_config, 64).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForCausalLMEagle3"]
    assert saved["model_type"] == "llama"
    assert saved["eagle_aux_hidden_state_layer_ids"] == [2, 16, 29]
    assert saved["num_aux_hidden_states"] == 3
    # SGLang adds one to the ids of `eagle_config`.
    assert saved["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 15, 28]
    # transformers 4 reads `rope_theta`.
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == 1234.0
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 1234.0
    assert DrafterConfig.from_pretrained(tmp_path).to_dict() == DrafterConfig.from_policy_config(
        policy_config, 64
    ).to_dict() | {"transformers_version": saved["transformers_version"]}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"draft_vocab_size": 32001}, "draft_vocab_size=32001.*vocab_size=32000"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0"),
        ({"aux_hidden_state_layer_ids": [2, 16, 32]}, "between 0 and 31.*2, 16, 29"),
        ({"aux_hidden_state_layer_ids": [-1, 16, 29]}, "between 0 and 31"),
        ({"aux_hidden_state_layer_ids": [2, 2, 29]}, "strictly increasing"),
        ({"aux_hidden_state_layer_ids": []}, "strictly increasing"),
    ],
)
def test_bad_fields_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        DrafterConfig.from_policy_config(LlamaConfig(), **arguments)


def test_unsupported_policies_are_named():
    with pytest.raises(ValueError, match="model_type='gpt2'.*llama, mistral, qwen2, qwen3"):
        DrafterConfig.from_policy_config(GPT2Config())


def test_the_layer_is_the_engines_whatever_the_policys_activation():
    assert DrafterConfig.from_policy_config(LlamaConfig(hidden_act="gelu")).hidden_act == "silu"


def test_fields_that_mistral_leaves_out():
    config = DrafterConfig.from_policy_config(MistralConfig(hidden_size=96, num_attention_heads=3, head_dim=None))
    assert config.head_dim == 32 and not config.attention_bias
