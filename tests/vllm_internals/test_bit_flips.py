"""One wrong bit on the way into a real engine, in every kind of tensor, is noticed."""

import pytest
import torch
from tests.conftest import save_tiny_policy
from transformers import AutoModelForCausalLM

from tlt_trl.drafter.modeling_drafter import Drafter
from tlt_trl.generation.engine import RolloutEngine
from tlt_trl.generation.standalone import build_llm
from tlt_trl.vllm_internals.weights import WeightMismatchError


pytestmark = pytest.mark.engine


class Setup:
    """A Qwen2 policy, whose q, k and v have biases, in float32, and an engine in bfloat16."""

    def __init__(self, folder):
        directory = save_tiny_policy(folder / "policy", num_layers=2, model_type="qwen2", spread_vectors=0.3)
        self.policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.drafter = Drafter.from_policy(self.policy, torch.arange(0, 64, 2))
        self.drafter.save_pretrained(folder / "drafter")
        self.llm = build_llm(
            directory,
            drafter=str(folder / "drafter"),
            max_num_seqs=4,
            max_model_len=128,
            enforce_eager=True,
            kv_cache_memory_bytes=2**26,
            dtype="bfloat16",
        )
        self.engine = RolloutEngine(self.llm)

    def push(self):
        self.engine.push_policy(self.policy.named_parameters())
        self.engine.push_drafter(self.drafter.vllm_weights())


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return Setup(tmp_path_factory.mktemp("bit_flips"))


def flip_last_bit(tensor):
    """A copy whose first number differs in the last bit that bfloat16 keeps, and integers by one."""
    changed = tensor.detach().clone()
    first = changed.view(-1)[:1]
    if tensor.is_floating_point():
        first.copy_((first.bfloat16().view(torch.int16) ^ 1).view(torch.bfloat16))
    else:
        first += 1
    return changed


def loading_wrongly(model, monkeypatch, name):
    """Lets the engine's model load one tensor with a wrong bit, after it was handed over."""
    load = model.load_weights
    monkeypatch.setattr(
        model, "load_weights", lambda items: load((n, flip_last_bit(w) if n == name else w) for n, w in items)
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.self_attn.v_proj.bias",
        "model.layers.0.input_layernorm.weight",
        "model.norm.weight",
        # Packed, the first two also fused.
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.embed_tokens.weight",  # and the head that is tied to it
    ],
)
def test_in_the_policy(setup, monkeypatch, name):
    setup.push()
    loading_wrongly(setup.engine.weights.policy, monkeypatch, name)
    with pytest.raises(WeightMismatchError, match=name):
        setup.push()
    monkeypatch.undo()
    setup.push()


@pytest.mark.parametrize(
    "name",
    [
        "d2t",
        "fc.weight",
        "lm_head.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.self_attn.q_proj.weight",
        "midlayer.self_attn.k_proj.bias",
        "midlayer.mlp.down_proj.weight",
    ],
)
def test_in_the_drafter(setup, monkeypatch, name):
    setup.push()
    loading_wrongly(setup.engine.weights.drafter, monkeypatch, name)
    with pytest.raises(WeightMismatchError, match=name.replace("midlayer", "layers.0")):
        setup.push()
    monkeypatch.undo()
    setup.push()


def test_biases_that_the_engine_keeps_in_float32_are_no_false_alarm(setup):
    # As vLLM's CPU backend does where the processor has AMX: finer than the weights, and not rounded to them.
    biases = [layer.self_attn.qkv_proj.bias for layer in setup.engine.weights.policy.model.layers]
    for bias in biases:
        bias.data = bias.data.float()
    try:
        setup.push()
        assert torch.equal(biases[0].data[:64], setup.policy.model.layers[0].self_attn.q_proj.bias)
    finally:
        for bias in biases:
            bias.data = bias.data.bfloat16()
    setup.push()
