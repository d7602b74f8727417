"""
Comparing weights that were pushed into an engine with what the engine holds.

An engine may fuse weights (q, k and v in one tensor), pad them, or pack them into a form that cannot be read (the CPU
backend keeps an empty `weight`). What can be read is compared bit for bit by a checksum; what was packed is compared
by the layer's output for a fixed probe vector.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


# Checkpoint name of a part -> name of the fused module in vLLM, and the index of the part among its outputs.
FUSED_MODULES = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}

# A packed layer and a plain product add in different orders; both round the sum once to bfloat16 (2**-8 relative).
PROBE_TOLERANCE = 2**-6


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """
    Compact description of a tensor.

    Attributes:
        shape (`tuple[int, ...]`):
            Shape of the weight that was pushed.
        checksum (`int`, *optional*):
            Sum of the tensor's bit patterns; `None` when the engine's copy cannot be read.
        probe (`torch.Tensor`, *optional*):
            Product with a fixed vector, shape (out_features,); `None` where there is no product to take.
    """

    shape: tuple[int, ...]
    checksum: int | None
    probe: torch.Tensor | None


@functools.lru_cache(maxsize=64)
def probe_vector(width: int) -> torch.Tensor:
    """Fixed vector of +1 and -1, shape (width,)."""
    generator = torch.Generator().manual_seed(width)
    return torch.randint(0, 2, (width,), generator=generator).mul(2).sub(1)


def bits_checksum(tensor: torch.Tensor) -> int:
    """
    Sum of the bit patterns of `tensor`, modulo 2**64.

    Eight bytes are added at once, without a cast: 1.5 ms instead of 92 ms for an embedding of 28 M bfloat16 numbers.
    """
    raw = tensor.contiguous().flatten().view(torch.uint8)
    whole = raw.numel() // 8 * 8
    return raw[:whole].view(torch.int64).sum().item() + raw[whole:].sum().item()


def fingerprint_of_weight(tensor: torch.Tensor, dtype: torch.dtype) -> Fingerprint:
    """Fingerprint of a weight as the engine will hold it, that is rounded to `dtype`."""
    weight = tensor.detach().to(dtype)
    probe = weight @ probe_vector(weight.shape[1]).to(weight) if weight.dim() == 2 else None
    return Fingerprint(tuple(weight.shape), bits_checksum(weight), probe)


def fingerprint_of_module(
    model: torch.nn.Module,
    name: str,
    shape: tuple[int, ...],
    multiply: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor | None],
) -> Fingerprint | None:
    """
    Fingerprint of the engine's copy of a weight.

    Args:
        model (`torch.nn.Module`):
            The engine's model.
        name (`str`):
            Name of the weight in the checkpoint.
        shape (`tuple[int, ...]`):
            Shape of the weight that was pushed (an embedding in the engine is padded to more rows).
        multiply (`Callable[[torch.nn.Module, torch.Tensor], torch.Tensor | None]`):
            Product of a layer and a row vector, as the engine computes it; `None` for a layer that does not multiply.

    Returns:
        `Fingerprint`: or `None` when the engine has no module under that name.
    """
    module_name, _, leaf = name.rpartition(".")
    parent_name, _, part = module_name.rpartition(".")
    fused_name, index = FUSED_MODULES.get(part, (part, None))
    full_name = f"{parent_name}.{fused_name}" if parent_name else fused_name
    modules = dict(model.named_modules())
    # The drafter's layers sit under `model.` inside vLLM; its head does not.
    module = modules.get(full_name, modules.get(f"model.{full_name}"))
    if module is None or module._parameters.get(leaf) is None:
        return None
    weight = module._parameters[leaf]
    selected = _rows_of_part(module, index, shape[0])
    checksum = bits_checksum(weight.data[selected]) if weight.numel() else None
    probe = None
    if leaf == "weight" and len(shape) == 2:
        output = multiply(module, probe_vector(shape[1])[None])
        probe = None if output is None else output[0, selected]
    return Fingerprint(shape, checksum, probe)


def _rows_of_part(module: torch.nn.Module, index: int | None, rows: int | None) -> slice:
    if index is None:
        return slice(0, rows)
    sizes = module.output_sizes
    start = sum(sizes[:index])
    return slice(start, start + sizes[index])


def compare_fingerprints(
    pushed: dict[str, Fingerprint], read: Callable[[str, tuple[int, ...]], Fingerprint | None]
) -> list[str]:
    """
    Names of the weights whose copy in the engine differs from the one pushed.

    Args:
        pushed (`dict[str, Fingerprint]`):
            Fingerprints of what was pushed, by checkpoint name.
        read (`Callable[[str, tuple[int, ...]], Fingerprint | None]`):
            Reads the engine's copy of a weight of that shape.

    Raises:
        `RuntimeError`: If none of the weights was found in the engine, since then nothing was compared.
    """
    actual = {name: read(name, expected.shape) for name, expected in pushed.items()}
    if pushed and not any(actual.values()):
        raise RuntimeError(
            f"None of the {len(pushed)} weights pushed was found in the engine (first: {next(iter(pushed))!r}); the "
            "weight sync cannot be verified for this architecture. Set `vllm_verify_weight_sync=False` to go without."
        )
    return [name for name, found in actual.items() if found is not None and not _same(pushed[name], found)]


def _same(expected: Fingerprint, actual: Fingerprint) -> bool:
    if actual.checksum is not None and actual.checksum != expected.checksum:
        return False
    if actual.probe is None or expected.probe is None:
        return True
    scale = expected.probe.float().abs().max().clamp_min(1e-6)
    difference = (expected.probe.float() - actual.probe.float().to(expected.probe.device)).abs().max()
    return bool(difference <= PROBE_TOLERANCE * scale)
