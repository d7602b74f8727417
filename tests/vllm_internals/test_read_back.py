import pytest
import torch
from torch import nn

from tlt_trl.vllm_internals.read_back import (
    EngineTensors,
    bits_checksum,
    compare_fingerprints,
    fingerprint_of_weight,
    probe_vectors,
)
from tlt_trl.vllm_internals.weights import is_finite


class Fused(nn.Module):
    """A fused layer as vLLM has it, readable or packed; its bias may be finer than its weight."""

    def __init__(self, parts, packed, biases=None):
        super().__init__()
        self.kernel = torch.cat(parts)
        self.output_partition_sizes = [len(part) for part in parts]
        self.weight = nn.Parameter(self.kernel[:0] if packed else self.kernel.clone(), requires_grad=False)
        if biases is not None:
            self.bias = nn.Parameter(torch.cat(biases).float(), requires_grad=False)


def multiply(module, rows):
    return rows.to(module.kernel) @ module.kernel.T if isinstance(module, Fused) else None


def engine_model(parts, packed=False, biases=None):
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.qkv_proj = Fused(parts, packed, biases)
    model.embed_tokens = nn.Embedding(8, 4)  # padded: the policy has 6 rows
    return model


def compare(model, pushed):
    engine = EngineTensors(model, multiply)
    dtypes = {name: engine.dtype(name) or torch.float32 for name in pushed}
    return compare_fingerprints(
        {name: fingerprint_of_weight(tensor, dtypes[name]) for name, tensor in pushed.items()}, engine
    )


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 4, generator=generator) for rows in (6, 2, 2)]


def names(parts, leaf="weight"):
    return dict(zip((f"layer.{part}_proj.{leaf}" for part in "qkv"), parts, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_equal_weights_pass(parts, packed):
    assert compare(engine_model(parts, packed), names(parts)) == ([], [])


@pytest.mark.parametrize("packed", [False, True])
def test_swapped_parts_are_named(parts, packed):
    model = engine_model([parts[0], parts[2], parts[1]], packed)
    assert compare(model, names(parts))[0] == ["layer.k_proj.weight", "layer.v_proj.weight"]


def test_stale_copy_behind_a_readable_weight_is_named(parts):
    # The CPU backend multiplies by a packed copy: the weight that can be read may be new while the copy is old.
    model = engine_model(parts)
    model.layer.qkv_proj.kernel = model.layer.qkv_proj.kernel * 1.1
    assert compare(model, names(parts))[0] == list(names(parts))


def test_one_bit_is_enough_where_the_weight_can_be_read(parts):
    model = engine_model(parts)
    weight = model.layer.qkv_proj.weight.data
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(10.0))
    assert compare(model, names(parts))[0] == ["layer.q_proj.weight"]


@pytest.mark.parametrize("width", [64, 576, 4096])
def test_a_small_error_in_one_number_of_a_packed_row_is_named(width):
    generator = torch.Generator().manual_seed(width)
    weights = [torch.randn(rows, width, generator=generator).bfloat16() for rows in (16, 8, 8)]
    model = engine_model(weights, packed=True)
    assert compare(model, names(weights)) == ([], [])
    for row in range(32):
        original = model.layer.qkv_proj.kernel[row].clone()
        # Half of the largest number of the row: its exponent's last bit.
        model.layer.qkv_proj.kernel[row, original.abs().argmax()] *= 0.5
        assert len(compare(model, names(weights))[0]) == 1, row
        model.layer.qkv_proj.kernel[row] = original


def test_biases_are_compared_in_the_dtype_that_the_engine_keeps_them_in(parts):
    # The CPU backend has float32 biases, unrounded, beside bfloat16 weights.
    weights = [part.bfloat16() for part in parts]
    biases = [torch.randn(len(part), generator=torch.Generator().manual_seed(i)) for i, part in enumerate(parts)]
    model = engine_model(weights, biases=biases)
    pushed = names(weights) | names(biases, "bias")
    assert compare(model, pushed) == ([], [])
    model.layer.qkv_proj.bias.data[7] = torch.nextafter(biases[1][1], torch.tensor(10.0))
    assert compare(model, pushed)[0] == ["layer.k_proj.bias"]


def test_buffers_are_compared():
    model = engine_model([torch.ones(2, 4)] * 3)
    model.register_buffer("table", torch.arange(5.0))
    assert compare(model, {"table": torch.arange(5.0)}) == ([], [])
    assert compare(model, {"table": torch.arange(5.0) + 1}) == (["table"], [])


def test_padding_rows_of_an_embedding_are_ignored():
    model = engine_model([torch.ones(2, 4)] * 3)
    assert compare(model, {"embed_tokens.weight": model.embed_tokens.weight[:6]}) == ([], [])


def test_what_the_engine_does_not_have_is_said(parts):
    assert compare(engine_model(parts), {"transformer.h.0.weight": parts[0]}) == ([], ["transformer.h.0.weight"])


def test_a_packed_layer_that_does_not_multiply_cannot_be_compared(parts):
    model = engine_model(parts)
    model.embed_tokens.weight = nn.Parameter(torch.empty(0))
    assert compare(model, {"embed_tokens.weight": torch.ones(6, 4)}) == ([], ["embed_tokens.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (5, 7), (4, 8)])
def test_checksum_sees_every_element(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = bits_checksum(tensor)
    for index in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1)[index] += 1
        assert bits_checksum(changed) != before


def test_probe_vectors_are_fixed_signs():
    assert set(probe_vectors(64).flatten().tolist()) == {-1, 1}
    assert torch.equal(probe_vectors(64), probe_vectors(64))
    assert probe_vectors(64).unique(dim=0).shape == probe_vectors(64).shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_weights_are_told_from_broken_ones(dtype):
    weight = torch.ones(3, 5, dtype=dtype)
    assert is_finite(weight) and is_finite(torch.empty(0, dtype=dtype))
    assert is_finite(weight * torch.finfo(dtype).max)  # whose sum overflows
    for broken in (float("nan"), float("inf"), float("-inf")):
        weight[1, 2] = broken
        assert not is_finite(weight)
    weight[0, 0] = float("inf")  # beside -inf, which a sum turns into NaN
    assert not is_finite(weight)
