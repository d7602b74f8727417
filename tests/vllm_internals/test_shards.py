"""The slices that a rank of a tensor-parallel engine should hold are those that vLLM's own layers load."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import linear, vocab_parallel_embedding

from tlt_trl.vllm_internals.contract import UnsupportedEngineError
from tlt_trl.vllm_internals.read_back import EngineTensors, compare_fingerprints, fingerprint_of_weight
from tlt_trl.vllm_internals.shards import TensorParallelRank


HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD, INTERMEDIATE, VOCAB = 32, 8, 2, 4, 48, 100
SHAPES = {
    "attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
    "attn.k_proj.weight": (KEY_VALUE_HEADS * HEAD, HIDDEN),
    "attn.v_proj.weight": (KEY_VALUE_HEADS * HEAD, HIDDEN),
    "attn.q_proj.bias": (HEADS * HEAD,),
    "attn.k_proj.bias": (KEY_VALUE_HEADS * HEAD,),
    "attn.v_proj.bias": (KEY_VALUE_HEADS * HEAD,),
    "attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "attn.o_proj.bias": (HIDDEN,),
    "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "norm.weight": (HIDDEN,),
    "embed_tokens.weight": (VOCAB, HIDDEN),
    "lm_head.weight": (VOCAB, HIDDEN),
}


class Block(torch.nn.Module):
    """The kinds of layers of a policy and a drafter, made by vLLM."""

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = torch.nn.Module(), torch.nn.Module()
        self.attn.qkv_proj = linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, KEY_VALUE_HEADS, bias=True)
        self.attn.o_proj = linear.RowParallelLinear(HEADS * HEAD, HIDDEN, bias=True)
        self.mlp.gate_up_proj = linear.MergedColumnParallelLinear(HIDDEN, [INTERMEDIATE] * 2, bias=False)
        self.mlp.down_proj = linear.RowParallelLinear(INTERMEDIATE, HIDDEN, bias=False)
        self.fc = linear.ReplicatedLinear(3 * HIDDEN, HIDDEN, bias=False)
        self.norm = torch.nn.RMSNorm(HIDDEN)
        self.embed_tokens = vocab_parallel_embedding.VocabParallelEmbedding(VOCAB, HIDDEN)
        self.lm_head = vocab_parallel_embedding.ParallelLMHead(VOCAB, HIDDEN)

    def load(self, weights):
        """By the loaders that vLLM's models use."""
        parts = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")}
        parts |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
        for name, tensor in weights.items():
            *parent, part, leaf = name.split(".")
            fused, shard = parts.get(part, (part, None))
            parameter = self.get_submodule(".".join([*parent, fused])).get_parameter(leaf)
            if part == "norm":
                parameter.data.copy_(tensor)
            elif shard is None:
                parameter.weight_loader(parameter, tensor)
            else:
                parameter.weight_loader(parameter, tensor, shard)


@pytest.fixture
def make_block(monkeypatch):
    def make(rank, num_ranks):
        for module in (linear, vocab_parallel_embedding):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: num_ranks)
        # Its parameters take the rank from the group.
        monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: num_ranks)
        with set_current_vllm_config(VllmConfig()):
            return Block()

    return make


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def compare(block, weights, rank):
    engine = EngineTensors(block, lambda module, rows: None, rank)
    pushed = {name: fingerprint_of_weight(engine.slice_of(name, t), t.dtype) for name, t in weights.items()}
    return compare_fingerprints(pushed, engine)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_holds_its_slices(make_block, weights, num_ranks):
    for rank in range(num_ranks):
        block = make_block(rank, num_ranks)
        block.load(weights)
        assert compare(block, weights, TensorParallelRank(rank, num_ranks)) == ([], [])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_slices_of_another_rank_are_found(make_block, weights, num_ranks):
    block = make_block(num_ranks - 1, num_ranks)
    block.load(weights)
    differing, missing = compare(block, weights, TensorParallelRank(0, num_ranks))
    everywhere_the_same = {"attn.o_proj.bias", "fc.weight", "norm.weight"}
    assert set(differing) == SHAPES.keys() - everywhere_the_same and not missing


@pytest.mark.parametrize("name", SHAPES)
def test_one_wrong_number_is_enough(make_block, weights, name):
    rank = TensorParallelRank(1, 2)
    block = make_block(1, 2)
    # The last number of each tensor belongs to the last rank.
    block.load(weights | {name: torch.cat([weights[name].flatten()[:-1], torch.tensor([9.0])]).view(SHAPES[name])})
    assert compare(block, weights, rank) == ([name], [])


def test_a_rank_with_nothing_but_padding(make_block, weights):
    small = {"embed_tokens.weight": weights["embed_tokens.weight"][:20]}
    block = make_block(1, 2)  # 100 rows are padded to 128, so the second rank has those from 64 on
    assert compare(block, small, TensorParallelRank(1, 2)) == ([], [])


def test_a_layer_that_is_fused_in_the_checkpoint_is_refused(make_block):
    with pytest.raises(UnsupportedEngineError, match="vllm_verify_weight_sync=False"):
        compare(make_block(0, 2), {"attn.qkv_proj.weight": torch.ones(48, HIDDEN)}, TensorParallelRank(0, 2))
