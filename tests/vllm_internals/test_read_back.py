import pytest
import torch
from torch import nn

from tlt_trl.vllm_internals.read_back import (
    bits_checksum,
    compare_fingerprints,
    fingerprint_of_module,
    fingerprint_of_weight,
    probe_vector,
)


class Fused(nn.Module):
    """A fused layer as vLLM has it, readable or packed."""

    def __init__(self, parts, packed):
        super().__init__()
        self.kernel = torch.cat(parts)
        self.output_sizes = [len(part) for part in parts]
        self.weight = nn.Parameter(torch.empty(0) if packed else self.kernel.clone(), requires_grad=False)


def multiply(module, row):
    return row.to(module.kernel) @ module.kernel.T if isinstance(module, Fused) else None


def engine_model(parts, packed=False):
    model = nn.Module()
    model.layer = nn.Module()
    model.layer.qkv_proj = Fused(parts, packed)
    model.embed_tokens = nn.Embedding(8, 4)  # padded: the policy has 6 rows
    return model


def compare(model, pushed):
    return compare_fingerprints(
        {name: fingerprint_of_weight(tensor, torch.float32) for name, tensor in pushed.items()},
        lambda name, shape: fingerprint_of_module(model, name, shape, multiply),
    )


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 4, generator=generator) for rows in (6, 2, 2)]


def names(parts):
    return dict(zip(("layer.q_proj.weight", "layer.k_proj.weight", "layer.v_proj.weight"), parts, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_equal_weights_pass(parts, packed):
    assert compare(engine_model(parts, packed), names(parts)) == []


@pytest.mark.parametrize("packed", [False, True])
def test_swapped_parts_are_named(parts, packed):
    model = engine_model([parts[0], parts[2], parts[1]], packed)
    assert compare(model, names(parts)) == ["layer.k_proj.weight", "layer.v_proj.weight"]


def test_stale_copy_behind_a_readable_weight_is_named(parts):
    # The CPU backend multiplies by a packed copy: the weight that can be read may be new while the copy is old.
    model = engine_model(parts)
    model.layer.qkv_proj.kernel = model.layer.qkv_proj.kernel * 1.1
    assert compare(model, names(parts)) == list(names(parts))


def test_one_bit_is_enough_where_the_weight_can_be_read(parts):
    model = engine_model(parts)
    weight = model.layer.qkv_proj.weight.data
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(10.0))
    assert compare(model, names(parts)) == ["layer.q_proj.weight"]


def test_padding_rows_of_an_embedding_are_ignored():
    model = engine_model([torch.ones(2, 4)] * 3)
    assert compare(model, {"embed_tokens.weight": model.embed_tokens.weight[:6]}) == []


def test_nothing_compared_is_an_error(parts):
    with pytest.raises(RuntimeError, match="vllm_verify_weight_sync=False"):
        compare(engine_model(parts), {"transformer.h.0.weight": parts[0]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (5, 7), (4, 8)])
def test_checksum_sees_every_element(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = bits_checksum(tensor)
    for index in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1)[index] += 1
        assert bits_checksum(changed) != before


def test_probe_vector_is_fixed_signs():
    assert set(probe_vector(64).tolist()) == {-1, 1}
    assert torch.equal(probe_vector(64), probe_vector(64))
