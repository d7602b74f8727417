import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tlt_trl.drafter import Drafter
from tlt_trl.drafter.checkpoint import DrafterSnapshot, run_facts


@pytest.fixture
def saved(make_drafter, tmp_path):
    """A drafter with a reduced vocabulary and its folder."""
    drafter = make_drafter(draft_token_ids=torch.arange(1, 128, 3))
    drafter.save_pretrained(tmp_path, provenance={"policy": "tiny", "tokens_trained": 7})
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
    loaded = Drafter.from_pretrained(directory, policy.config)
    assert_equal(loaded, drafter)
    assert loaded.config.to_dict() == drafter.config.to_dict() | {
        "transformers_version": loaded.config.transformers_version
    }
    provenance = json.loads((directory / "provenance.json").read_text())
    assert provenance == run_facts() | {"policy": "tiny", "tokens_trained": 7}
    assert not list(directory.glob("*.partial"))


def test_full_vocabulary_is_saved_without_a_mapping(make_drafter, policy, tmp_path):
    drafter = make_drafter()
    drafter.save_pretrained(tmp_path)
    assert not {"d2t", "t2d", "embed_tokens.weight"} & load_file(tmp_path / "model.safetensors").keys()
    assert_equal(Drafter.from_pretrained(tmp_path, policy.config), drafter)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_round_trip_of_other_policies(make_policy, tmp_path, kind):
    policy = make_policy(kind)
    drafter = Drafter.from_policy(policy)
    drafter.save_pretrained(tmp_path)
    assert_equal(Drafter.from_pretrained(tmp_path, policy.config), drafter)


def test_loading_leaves_the_random_state_alone(saved, policy):
    before = torch.get_rng_state()
    Drafter.from_pretrained(saved[1], policy.config)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_pretrained_is_the_layout_of_the_engines(make_policy, tmp_path, tied, reduced, dtype):
    policy = make_policy(tied=tied)
    drafter = Drafter.from_policy(policy, torch.arange(64) if reduced else None)
    drafter.save_pretrained(tmp_path, dtype=dtype, provenance={"policy": "tiny"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["dtype"] == str(dtype).removeprefix("torch.") and "auto_map" not in config
    assert config["draft_vocab_size"] == (64 if reduced else 128) and config["tie_word_embeddings"] is False
    weights = load_file(tmp_path / "model.safetensors")
    assert ("d2t" in weights) == reduced and "embed_tokens.weight" not in weights
    assert weights["fc.weight"].dtype == dtype
    loaded = Drafter.from_pretrained(tmp_path, policy.config, dtype=dtype)
    assert loaded.config.dtype == dtype
    assert_equal(loaded, drafter.to(dtype))
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert provenance["policy"] == "tiny" and provenance["versions"]["torch"] and provenance["command"]


def test_other_dtypes_are_refused(make_drafter, tmp_path):
    with pytest.raises(ValueError, match="not in torch.int8"):
        make_drafter().save_pretrained(tmp_path, dtype=torch.int8)


def test_from_pretrained_refuses_another_policy(saved, make_policy):
    with pytest.raises(ValueError, match="hidden_size=64, but the policy has hidden_size=32"):
        Drafter.from_pretrained(saved[1], make_policy(hidden_size=32, head_dim=16).config)


def test_what_is_read_back_is_compared(make_drafter, tmp_path, monkeypatch):
    def lose_a_bit(weights, path, metadata):
        save_file(weights | {"norm.weight": weights["norm.weight"] + 1e-3}, path, metadata=metadata)

    make_drafter().save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr("tlt_trl.drafter.checkpoint.save_file", lose_a_bit)
    with pytest.raises(OSError, match="Tensors that differ: norm.weight"):
        make_drafter().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_snapshot_does_not_follow_the_drafter(make_drafter, policy, tmp_path):
    drafter = make_drafter()
    snapshot = DrafterSnapshot.of(drafter)
    untouched = make_drafter()
    for parameter in drafter.parameters():
        parameter.data.zero_()
    snapshot.write(tmp_path, {})
    assert_equal(Drafter.from_pretrained(tmp_path, policy.config), untouched)


class TestForeignHeads:
    def test_layout_of_the_authors(self, saved, policy):
        # Neither layer ids nor sizes of the target, no t2d needed, rope in the keys of transformers 4.
        drafter, directory = saved
        edit_weights(directory, lambda weights: weights.pop("t2d"))
        config = json.loads((directory / "config.json").read_text())
        names = ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size", "num_attention_heads")
        names += ("num_key_value_heads", "num_hidden_layers", "rms_norm_eps", "rope_theta", "max_position_embeddings")
        (directory / "config.json").write_text(json.dumps({name: config[name] for name in names}))
        loaded = Drafter.from_pretrained(directory, policy.config)
        assert_equal(loaded, drafter)
        assert loaded.config.rope_parameters["rope_theta"] == 5000.0
        with pytest.raises(ValueError, match="pass `policy_config`"):
            Drafter.from_pretrained(directory)

    def test_layer_ids_as_sglang_counts_them(self, saved, policy):
        _, directory = saved
        edit_config(
            directory,
            eagle_aux_hidden_state_layer_ids=None,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 1, 2], "use_aux_hidden_state": True},
        )
        assert Drafter.from_pretrained(directory, policy.config).config.eagle_aux_hidden_state_layer_ids == [0, 2, 3]

    def test_specforge_layout(self, saved, policy):
        drafter, directory = saved

        def edit(weights):
            weights["embed_tokens.weight"] = torch.zeros(128, 64)
            del weights["t2d"]
            weights["fc.weight"] = weights["fc.weight"].clone()

        edit_weights(directory, edit)
        edit_config(directory, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
        loaded = Drafter.from_pretrained(directory, policy.config)
        assert_equal(loaded, drafter)
        assert loaded.config.eagle_aux_hidden_state_layer_ids == [1, 2, 3]

    def test_speculators_layout(self, saved, policy):
        drafter, directory = saved
        edit_weights(directory, lambda weights: _rename(weights, "midlayer.", "layers.0."))
        config = json.loads((directory / "config.json").read_text())
        outer = {name: config.pop(name) for name in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")}
        outer |= {"speculators_model_type": "eagle3", "transformer_layer_config": config}
        (directory / "config.json").write_text(json.dumps(outer | {"norm_before_residual": False}))
        assert_equal(Drafter.from_pretrained(directory, policy.config), drafter)

    def test_variants_are_refused(self, saved, policy):
        edit_config(saved[1], norm_before_residual=True)
        with pytest.raises(ValueError, match="norm_before_residual=True"):
            Drafter.from_pretrained(saved[1], policy.config)

    def test_deeper_heads_are_refused(self, saved, policy):
        edit_config(saved[1], num_hidden_layers=2)
        with pytest.raises(ValueError, match="num_hidden_layers=2"):
            Drafter.from_pretrained(saved[1], policy.config)

    def test_a_policy_is_not_a_drafter(self, policy, tmp_path):
        policy.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="num_hidden_layers=4"):
            Drafter.from_pretrained(tmp_path, policy.config)


class RunsCode:
    """Pickled as a call that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


class TestPickledHeads:
    @pytest.fixture
    def pickled(self, saved):
        """A folder as EAGLE's authors publish them: their file, their names, no layer ids, an embedding beside it."""
        drafter, folder = saved
        weights = load_file(folder / "model.safetensors") | {"embed_tokens.weight": torch.zeros(128, 64)}
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
        config = json.loads((folder / "config.json").read_text())
        for name in ("eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states", "head"):
            config.pop(name, None)
        (folder / "config.json").write_text(json.dumps(config))
        return drafter, folder

    def test_loads(self, pickled, policy):
        drafter, folder = pickled
        loaded = Drafter.from_pretrained(folder, policy.config)
        assert all(torch.equal(loaded.state_dict()[name], t) for name, t in drafter.state_dict().items())
        assert loaded.config.head == "own"

    def test_safetensors_come_first(self, pickled, policy):
        drafter, folder = pickled
        drafter.save_pretrained(folder)
        (folder / "pytorch_model.bin").write_bytes(b"not read")
        Drafter.from_pretrained(folder, policy.config)

    def test_code_is_refused_and_not_run(self, pickled, policy, tmp_path):
        torch.save({"fc.weight": RunsCode(tmp_path / "made")}, pickled[1] / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model.bin was not loaded: it holds more than tensors"):
            Drafter.from_pretrained(pickled[1], policy.config)
        assert not (tmp_path / "made").exists()

    @pytest.mark.parametrize("content", [[torch.zeros(1)], {"fc.weight": 1.0}])
    def test_something_else_is_refused(self, pickled, policy, content):
        torch.save(content, pickled[1] / "pytorch_model.bin")
        with pytest.raises(ValueError, match="no EAGLE-3 head"):
            Drafter.from_pretrained(pickled[1], policy.config)

    @pytest.mark.parametrize("kept_bytes", [0, 1000])
    def test_a_damaged_file(self, pickled, policy, kept_bytes):
        path = pickled[1] / "pytorch_model.bin"
        path.write_bytes(path.read_bytes()[:kept_bytes])
        with pytest.raises(ValueError, match="damaged"):
            Drafter.from_pretrained(pickled[1], policy.config)


class TestDamage:
    def test_truncated_file(self, saved, policy):
        path = saved[1] / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match="model.safetensors is damaged or incomplete"):
            Drafter.from_pretrained(saved[1], policy.config)

    def test_differences_are_all_named(self, saved, policy):
        def edit(weights):
            weights["extra.weight"] = torch.zeros(1)
            weights["norm.weight"] = torch.zeros(3)
            del weights["fc.weight"]

        edit_weights(saved[1], edit)
        named = r"missing fc.weight; unknown extra.weight; norm.weight has shape \(3,\) instead of \(64,\)"
        with pytest.raises(ValueError, match=named):
            Drafter.from_pretrained(saved[1], policy.config)

    def test_inconsistent_mapping(self, saved, policy):
        edit_weights(saved[1], lambda weights: weights["d2t"].sub_(1))
        with pytest.raises(ValueError, match="d2t and t2d disagree"):
            Drafter.from_pretrained(saved[1], policy.config)

    def test_mapping_outside_the_vocabulary(self, saved, policy):
        edit_weights(saved[1], lambda weights: weights["d2t"].add_(1000))
        with pytest.raises(ValueError, match="outside the vocabulary of 128"):
            Drafter.from_pretrained(saved[1], policy.config)

    def test_mapping_outside_the_vocabulary_without_its_inverse(self, saved, policy):
        def edit(weights):
            weights["d2t"] += 1000
            del weights["t2d"]

        edit_weights(saved[1], edit)
        with pytest.raises(ValueError, match="outside the vocabulary of 128"):
            Drafter.from_pretrained(saved[1], policy.config)

    def test_draft_vocabulary_larger_than_the_vocabulary(self, saved, policy):
        edit_config(saved[1], draft_vocab_size=129)
        with pytest.raises(ValueError, match="draft_vocab_size=129 is larger than vocab_size=128"):
            Drafter.from_pretrained(saved[1], policy.config)

    def test_no_weights_no_config(self, saved, policy):
        (saved[1] / "model.safetensors").unlink()
        (saved[1] / "training_args.bin").touch()
        with pytest.raises(ValueError, match="holds neither"):
            Drafter.from_pretrained(saved[1], policy.config)
        (saved[1] / "config.json").unlink()
        with pytest.raises(ValueError, match="no config.json"):
            Drafter.from_pretrained(saved[1], policy.config)

    def test_drafter_of_another_policy(self, saved, make_policy):
        with pytest.raises(ValueError, match="hidden_size=64, but the policy has hidden_size=32"):
            Drafter.from_pretrained(saved[1], make_policy(hidden_size=32, head_dim=16).config)


def _rename(weights, old, new):
    for name in [name for name in weights if name.startswith(old)]:
        weights[new + name.removeprefix(old)] = weights.pop(name)
