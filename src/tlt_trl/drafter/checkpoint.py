"""
Save and load drafters: `config.json` + `model.safetensors` as vLLM and SGLang read them, and `provenance.json`.

EAGLE-3 heads of other trainers are accepted when their keys map one to one; everything that does not fit is named.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from .configuration_drafter import DrafterConfig, default_aux_layer_ids
from .modeling_drafter import Drafter


WEIGHTS_NAME = "model.safetensors"
PROVENANCE_NAME = "provenance.json"

# Copies of the policy that other trainers keep beside the head. The policy's own are used instead.
POLICY_PREFIXES = ("embed_tokens.", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")
# Variants of the EAGLE-3 layer with another forward pass.
FOREIGN_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")


def save_drafter(drafter: Drafter, directory: str | os.PathLike, provenance: Mapping[str, Any]) -> None:
    """
    Save a drafter and read it back.

    Args:
        drafter ([`Drafter`]):
            The drafter, its weights saved in the dtype they have.
        directory (`str` or `os.PathLike`):
            Folder to write to, made when missing. Each file replaces its predecessor only once it is complete.
        provenance (`Mapping[str, Any]`):
            What it was trained from (policy, steps, tokens, versions …), anything that JSON can hold.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.cpu().contiguous() for name, tensor in drafter.vllm_weights()}
    partial = directory / f"{WEIGHTS_NAME}.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    _verify(partial, weights)
    partial.replace(directory / WEIGHTS_NAME)
    drafter.config.save_pretrained(directory)
    partial = directory / f"{PROVENANCE_NAME}.partial"
    partial.write_text(json.dumps(dict(provenance), indent=2, sort_keys=True) + "\n")
    partial.replace(directory / PROVENANCE_NAME)


def load_drafter(name_or_path: str | os.PathLike, policy_config: PretrainedConfig) -> Drafter:
    """
    Load a drafter that fits a policy, in fp32 and without touching any random state.

    Args:
        name_or_path (`str` or `os.PathLike`):
            Folder or Hub id of a drafter saved by [`save_drafter`], or of an EAGLE-3 head in the layout of its
            authors, of SpecForge or of speculators. Only safetensors are read.
        policy_config ([`~transformers.PretrainedConfig`]):
            Configuration of the policy it shall draft for.
    """
    directory = _local_directory(name_or_path)
    config = _read_config(directory, policy_config)
    with torch.random.fork_rng(devices=[]):
        drafter = Drafter(config, _any_token_ids(config))
    drafter.check_fits(policy_config)
    weights = _read_weights(directory)
    if not drafter.has_full_vocabulary and "t2d" not in weights and "d2t" in weights:
        weights["t2d"] = _t2d_from_d2t(weights["d2t"], config.vocab_size)
    if drafter.has_full_vocabulary:
        weights = {"d2t": drafter.d2t, "t2d": drafter.t2d} | weights
    _check_keys(directory, weights, drafter.state_dict())
    drafter.load_state_dict(weights)
    _check_mapping(directory, drafter)
    return drafter


def _verify(path: Path, weights: Mapping[str, Tensor]) -> None:
    """A full disk or a broken network file system shows here, not at the next start."""
    read = load_file(path)
    wrong = [name for name in weights if name not in read or not torch.equal(read[name], weights[name])]
    if wrong:
        raise OSError(f"{path} does not hold what was written to it. Tensors that differ: {', '.join(wrong)}.")


def _local_directory(name_or_path: str | os.PathLike) -> Path:
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    return Path(snapshot_download(str(name_or_path), allow_patterns=["*.json", "*.safetensors"]))


def _read_config(directory: Path, policy_config: PretrainedConfig) -> DrafterConfig:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} holds no config.json, so it is not a drafter saved by `save_drafter`.")
    config = json.loads(path.read_text())
    # speculators keeps the layer's own configuration apart.
    config = config.get("transformer_layer_config", {}) | config
    for variant in FOREIGN_VARIANTS:
        if config.get(variant) or (config.get("eagle_config") or {}).get(variant):
            raise ValueError(f"{path}: {variant}={config.get(variant)} is an EAGLE-3 variant that is not supported.")
    if config.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"{path}: num_hidden_layers={config['num_hidden_layers']}, but a drafter has 1 layer.")
    config["model_type"] = DrafterConfig.model_type
    config["dtype"] = torch.float32
    config.pop("torch_dtype", None)
    if config.get("eagle_aux_hidden_state_layer_ids") is None:
        # What the engines assume when the checkpoint does not say.
        config["eagle_aux_hidden_state_layer_ids"] = default_aux_layer_ids(policy_config.num_hidden_layers)
    return DrafterConfig.from_dict(config)


def _any_token_ids(config: DrafterConfig) -> Tensor:
    """Placeholder until the real mapping is loaded."""
    if config.draft_vocab_size > config.vocab_size:
        raise ValueError(f"draft_vocab_size={config.draft_vocab_size} is larger than vocab_size={config.vocab_size}.")
    return torch.arange(config.draft_vocab_size)


def _read_weights(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} holds no *.safetensors file. Pickled weights (*.bin, *.pt) are not loaded.")
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged or incomplete ({error}). Copy or download it again.") from error
    return {
        _our_name(name): tensor for name, tensor in weights.items() if not _our_name(name).startswith(POLICY_PREFIXES)
    }


def _our_name(name: str) -> str:
    """SpecForge and speculators prefix or number the layer that EAGLE calls `midlayer`."""
    name = name.removeprefix("draft_model.").removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _check_keys(directory: Path, given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    problems = [f"missing {name}" for name in sorted(wanted.keys() - given.keys())]
    problems += [f"unknown {name}" for name in sorted(given.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {tuple(given[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & given.keys())
        if given[name].shape != wanted[name].shape
    ]
    if problems:
        raise ValueError(f"{directory} is not an EAGLE-3 drafter that fits its config.json: {'; '.join(problems)}.")


def _t2d_from_d2t(d2t: Tensor, vocab_size: int) -> Tensor:
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[d2t + torch.arange(len(d2t))] = True
    return t2d


def _check_mapping(directory: Path, drafter: Drafter) -> None:
    drafted = drafter.draft_token_ids
    if drafted.min() < 0 or drafted.max() >= drafter.config.vocab_size:
        raise ValueError(f"{directory}: d2t leads outside the vocabulary of {drafter.config.vocab_size} tokens.")
    if not torch.equal(drafted, drafter.t2d.nonzero().flatten()):
        raise ValueError(f"{directory}: d2t and t2d disagree about which tokens are drafted.")
