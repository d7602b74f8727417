import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tlt_trl.drafter import Drafter, load_drafter, save_drafter


@pytest.fixture
def saved(make_drafter, tmp_path):
    """A drafter with a reduced vocabulary and its folder."""
    drafter = make_drafter(draft_token_ids=torch.arange(1, 128, 3))
    save_drafter(drafter, tmp_path, {"policy": "tiny", "tokens_trained": 7})
    return drafter, tmp_path


def edit_weights(directory, edit):
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors")


def edit_config(directory, **changes):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def assert_equal(first, second):
    for (name, tensor), (other_name, other) in zip(
        first.state_dict().items(), second.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert tensor.dtype == other.dtype
        assert torch.equal(tensor, other), name


def test_round_trip_is_bit_equal(saved, policy):
    drafter, directory = saved
    loaded = load_drafter(directory, policy.config)
    assert_equal(loaded, drafter)
    assert loaded.config.to_dict() == drafter.config.to_dict() | {
        "transformers_version": loaded.config.transformers_version
    }
    assert json.loads((directory / "provenance.json").read_text()) == {"policy": "tiny", "tokens_trained": 7}
    assert not list(directory.glob("*.partial"))


def test_full_vocabulary_is_saved_without_a_mapping(make_drafter, policy, tmp_path):
    drafter = make_drafter()
    save_drafter(drafter, tmp_path, {})
    assert not {"d2t", "t2d", "embed_tokens.weight"} & load_file(tmp_path / "model.safetensors").keys()
    assert_equal(load_drafter(tmp_path, policy.config), drafter)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_round_trip_of_other_policies(make_policy, tmp_path, kind):
    policy = make_policy(kind)
    drafter = Drafter.from_policy(policy)
    save_drafter(drafter, tmp_path, {})
    assert_equal(load_drafter(tmp_path, policy.config), drafter)


def test_loading_leaves_the_random_state_alone(saved, policy):
    before = torch.get_rng_state()
    load_drafter(saved[1], policy.config)
    assert torch.equal(torch.get_rng_state(), before)


class TestForeignHeads:
    def test_specforge_layout(self, saved, policy):
        drafter, directory = saved

        def edit(weights):
            weights["embed_tokens.weight"] = torch.zeros(128, 64)
            del weights["t2d"]
            weights["fc.weight"] = weights["fc.weight"].clone()

        edit_weights(directory, edit)
        edit_config(directory, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
        loaded = load_drafter(directory, policy.config)
        assert_equal(loaded, drafter)
        assert loaded.config.eagle_aux_hidden_state_layer_ids == [1, 2, 3]

    def test_speculators_layout(self, saved, policy):
        drafter, directory = saved
        edit_weights(directory, lambda weights: _rename(weights, "midlayer.", "layers.0."))
        config = json.loads((directory / "config.json").read_text())
        outer = {name: config.pop(name) for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
        outer |= {"speculators_model_type": "eagle3", "transformer_layer_config": config}
        (directory / "config.json").write_text(json.dumps(outer | {"norm_before_residual": False}))
        assert_equal(load_drafter(directory, policy.config), drafter)

    def test_variants_are_refused(self, saved, policy):
        edit_config(saved[1], norm_before_residual=True)
        with pytest.raises(ValueError, match="norm_before_residual=True"):
            load_drafter(saved[1], policy.config)

    def test_deeper_heads_are_refused(self, saved, policy):
        edit_config(saved[1], num_hidden_layers=2)
        with pytest.raises(ValueError, match="num_hidden_layers=2"):
            load_drafter(saved[1], policy.config)

    def test_a_policy_is_not_a_drafter(self, policy, tmp_path):
        policy.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="num_hidden_layers=4"):
            load_drafter(tmp_path, policy.config)


class TestDamage:
    def test_truncated_file(self, saved, policy):
        path = saved[1] / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match="model.safetensors is damaged or incomplete"):
            load_drafter(saved[1], policy.config)

    def test_differences_are_all_named(self, saved, policy):
        def edit(weights):
            weights["extra.weight"] = torch.zeros(1)
            weights["norm.weight"] = torch.zeros(3)
            del weights["fc.weight"]

        edit_weights(saved[1], edit)
        named = r"missing fc.weight; unknown extra.weight; norm.weight has shape \(3,\) instead of \(64,\)"
        with pytest.raises(ValueError, match=named):
            load_drafter(saved[1], policy.config)

    def test_inconsistent_mapping(self, saved, policy):
        edit_weights(saved[1], lambda weights: weights["d2t"].sub_(1))
        with pytest.raises(ValueError, match="d2t and t2d disagree"):
            load_drafter(saved[1], policy.config)

    def test_mapping_outside_the_vocabulary(self, saved, policy):
        edit_weights(saved[1], lambda weights: weights["d2t"].add_(1000))
        with pytest.raises(ValueError, match="outside the vocabulary of 128"):
            load_drafter(saved[1], policy.config)

    def test_draft_vocabulary_larger_than_the_vocabulary(self, saved, policy):
        edit_config(saved[1], draft_vocab_size=129)
        with pytest.raises(ValueError, match="draft_vocab_size=129 is larger than vocab_size=128"):
            load_drafter(saved[1], policy.config)

    def test_no_config_or_only_pickles(self, saved, policy, tmp_path):
        (saved[1] / "model.safetensors").rename(saved[1] / "pytorch_model.bin")
        with pytest.raises(ValueError, match="no .*safetensors.*Pickled"):
            load_drafter(saved[1], policy.config)
        (saved[1] / "config.json").unlink()
        with pytest.raises(ValueError, match="no config.json"):
            load_drafter(saved[1], policy.config)

    def test_drafter_of_another_policy(self, saved, make_policy):
        with pytest.raises(ValueError, match="hidden_size=64, but the policy has hidden_size=32"):
            load_drafter(saved[1], make_policy(hidden_size=32, head_dim=16).config)


def _rename(weights, old, new):
    for name in [name for name in weights if name.startswith(old)]:
        weights[new + name.removeprefix(old)] = weights.pop(name)
