"""
Comparing weights that were pushed into an engine with what the engine holds.

An engine may fuse weights (q, k and v in one tensor), pad them, keep them in a finer dtype (the CPU backend may have
float32 biases beside bfloat16 weights), or pack them into a form that cannot be read (it leaves an empty `weight`).
Tensors are compared bit for bit by a checksum, in the dtype that the engine keeps them in: after the load where they
can be read then, else at the moment before they are packed. Whether the engine multiplies by what was packed is told
by the layer's products with fixed probe vectors.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from .contract import require
from .shards import TensorParallelRank


# Checkpoint name of a part -> name of the fused module in vLLM, and the index of the part among its outputs.
FUSED_MODULES = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}

# An error in one number of a packed row shows where the row's product is small, and it is not small for every vector.
NUM_PROBES = 8

# Of a layer whose weight can be read as well: a kernel may round partial sums to bfloat16 (2**-8 relative).
COARSE_TOLERANCE = 2**-6
# Of a packed layer, relative to the largest product, beside the rounding of the product itself: the order of float32
# additions.
SUM_TOLERANCE = 2**-14

PackedChecksums = WeakKeyDictionary[torch.nn.Module, list[int]]

ONLY_RANK = TensorParallelRank()  # without tensor parallelism
Multiply = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """
    Compact description of a tensor.

    Attributes:
        shape (`tuple[int, ...]`):
            Shape of the tensor that was pushed.
        checksum (`int`, *optional*):
            Sum of the tensor's bit patterns; `None` when the engine's copy cannot be read.
        products (`torch.Tensor`, *optional*):
            Products with the probe vectors, shape (`NUM_PROBES`, out_features); `None` where there are none to take.
        is_packed (`bool`, *optional*, defaults to `False`):
            Whether only the products tell what the engine holds now.
    """

    shape: tuple[int, ...]
    checksum: int | None
    products: torch.Tensor | None
    is_packed: bool = False


@functools.lru_cache(maxsize=64)
def probe_vectors(width: int) -> torch.Tensor:
    """Fixed vectors of +1 and -1, shape (`NUM_PROBES`, width)."""
    generator = torch.Generator().manual_seed(width)
    return torch.randint(0, 2, (NUM_PROBES, width), generator=generator).mul(2).sub(1)


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
    products = None
    if weight.dim() == 2 and weight.is_floating_point():
        products = probe_vectors(weight.shape[1]).to(weight) @ weight.T
    return Fingerprint(tuple(weight.shape), bits_checksum(weight), products)


@contextmanager
def noting_packed_weights() -> Iterator[PackedChecksums]:
    """
    Notes checksums of the weights that vLLM's CPU backend packs inside the context, one of each part of a layer.

    The layerwise reload packs a layer as soon as its last part has come, and nothing is left to read then.
    """
    from vllm.model_executor.layers import utils

    pack = require(utils, "dispatch_cpu_unquantized_gemm")
    noted: PackedChecksums = WeakKeyDictionary()

    def note_and_pack(layer: torch.nn.Module, remove_weight: bool) -> None:
        if remove_weight and not layer.weight.is_meta and layer.weight.dim() == 2:
            # Those of a fused layer; one whose input is split over ranks has a single part and does not name it.
            sizes = vars(layer).get("output_partition_sizes", [len(layer.weight)])
            noted[layer] = [bits_checksum(part) for part in layer.weight.data.split(sizes)]
        pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = note_and_pack
    try:
        yield noted
    finally:
        utils.dispatch_cpu_unquantized_gemm = pack


class EngineTensors:
    """
    The tensors of a model in an engine, under the names that they have in a checkpoint.

    Args:
        model (`torch.nn.Module`):
            The engine's model, not while weights are being loaded.
        multiply (`Callable[[torch.nn.Module, torch.Tensor], torch.Tensor | None]`):
            Product of a layer and row vectors, as the engine computes it; `None` for a layer that does not multiply.
        rank ([`TensorParallelRank`], *optional*):
            Of this process, which holds slices in a tensor-parallel engine.

    Attributes:
        packed (`Mapping[torch.nn.Module, list[int]]`):
            Checksums of weights that cannot be read any more, see [`noting_packed_weights`].
    """

    def __init__(self, model: torch.nn.Module, multiply: Multiply, rank: TensorParallelRank = ONLY_RANK):
        self.packed: PackedChecksums = WeakKeyDictionary()
        # A tied head is the same tensor as the embedding, and in some models the same module.
        self._modules = dict(model.named_modules(remove_duplicate=False))
        tensors = itertools.chain(
            model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        )
        self._dtypes = {name: tensor.dtype for name, tensor in tensors}
        self._multiply = multiply
        self._rank = rank

    def _find(self, name: str) -> tuple[str, str, int | None] | None:
        """Module and tensor that hold what a checkpoint calls `name`, and the index of the part where it is fused."""
        module, _, leaf = name.rpartition(".")
        parent, _, part = module.rpartition(".")
        fused, index = FUSED_MODULES.get(part, (part, None))
        full_name = f"{parent}.{fused}" if parent else fused
        # The drafter's layers sit under `model.` inside vLLM; its head does not.
        for prefix, (path, at) in itertools.product(("", "model."), ((module, None), (full_name, index))):
            if f"{prefix}{path}.{leaf}".removeprefix(".") in self._dtypes:
                return f"{prefix}{path}", leaf, at
        return None

    def dtype(self, name: str) -> torch.dtype | None:
        """Dtype in which the engine keeps that tensor of the checkpoint; `None` when it has none of that name."""
        found = self._find(name)
        return None if found is None else self._dtypes[f"{found[0]}.{found[1]}".removeprefix(".")]

    def slice_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the checkpoint; all of one that the engine does not have."""
        found = self._find(name)
        return tensor if found is None else self._rank.slice_of(tensor, self._modules[found[0]], found[2])

    def fingerprint(self, name: str, shape: tuple[int, ...]) -> Fingerprint | None:
        """
        Fingerprint of the engine's copy of a tensor.

        Args:
            name (`str`):
                Its name in the checkpoint.
            shape (`tuple[int, ...]`):
                Shape of this rank's part of the tensor that was pushed (an embedding in the engine is padded to more
                rows).

        Returns:
            `Fingerprint`: or `None` when the engine has no tensor of that name, or one that can neither be read nor
            multiplied by.
        """
        found = self._find(name)
        if found is None:
            return None
        module_name, leaf, index = found
        module = self._modules[module_name]
        tensor = module.get_parameter(leaf) if leaf in module._parameters else module.get_buffer(leaf)
        selected = _rows_of_part(module, index, shape[0] if shape else None)
        checksum, is_packed = None, not tensor.numel()
        if not is_packed:
            checksum = bits_checksum(tensor.data[selected] if tensor.dim() else tensor.data)
        elif module in self.packed:
            checksum = self.packed[module][index or 0]
        products = None
        if leaf == "weight" and len(shape) == 2:
            output = self._multiply(module, probe_vectors(shape[1]))
            products = None if output is None else output[:, selected]
        return None if checksum is None and products is None else Fingerprint(shape, checksum, products, is_packed)


def _rows_of_part(module: torch.nn.Module, index: int | None, rows: int | None) -> slice:
    if index is None:
        return slice(0, rows)
    sizes = module.output_partition_sizes
    start = sum(sizes[:index])
    return slice(start, start + sizes[index])


def compare_fingerprints(pushed: dict[str, Fingerprint], engine: EngineTensors) -> tuple[list[str], list[str]]:
    """
    Compares what was pushed with the engine's copies.

    Args:
        pushed (`dict[str, Fingerprint]`):
            Fingerprints of what was pushed, by checkpoint name.
        engine ([`EngineTensors`]):
            The model that it was pushed to.

    Returns:
        `tuple[list[str], list[str]]`: Names of the tensors whose copy differs, and of those that cannot be compared.
    """
    actual = {name: engine.fingerprint(name, expected.shape) for name, expected in pushed.items()}
    differing = [name for name, found in actual.items() if found is not None and not _same(pushed[name], found)]
    return differing, [name for name, found in actual.items() if found is None]


def _same(expected: Fingerprint, actual: Fingerprint) -> bool:
    if actual.checksum is not None and actual.checksum != expected.checksum:
        return False
    if actual.products is None or expected.products is None or not expected.products.numel():
        return True  # a rank of an embedding may hold nothing but padding
    wanted = expected.products.float()
    difference = (wanted - actual.products.float().to(wanted.device)).abs()
    largest = wanted.abs().max()
    if actual.is_packed:  # nothing else tells what the engine multiplies by
        rounding = torch.finfo(expected.products.dtype).eps  # half of it on either side
        return bool((difference <= rounding * wanted.abs() + SUM_TOLERANCE * largest).all())
    return bool(difference.max() <= COARSE_TOLERANCE * largest.clamp_min(1e-6))
