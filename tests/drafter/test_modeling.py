import pytest
import torch
from tests.tolerance import assert_close, forward_operations
from transformers import LlamaConfig

from tlt_trl.drafter import Drafter, DrafterConfig
from tlt_trl.drafter.initialization import parameters_to_read


def random_inputs(num_tokens=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    embeds = torch.randn(1, num_tokens, 64, generator=generator)
    return embeds, torch.randn(1, num_tokens, 192, generator=generator)


class TestFromPolicy:
    @pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_copies_the_policy(self, make_policy, kind, tied):
        policy = make_policy(kind, tied)
        draft_token_ids = torch.arange(3, 128, 5)
        drafter = Drafter.from_policy(policy, draft_token_ids)
        last = policy.model.layers[-1]
        assert torch.equal(drafter.lm_head.weight, policy.lm_head.weight[draft_token_ids])
        assert torch.equal(drafter.norm.weight, policy.model.norm.weight)
        for name in ("q_proj", "k_proj", "v_proj"):
            mine, theirs = drafter.midlayer.self_attn.get_submodule(name), last.self_attn.get_submodule(name)
            assert torch.equal(mine.weight[:, 64:], theirs.weight)
            assert not mine.weight[:, :64].any()
            if kind == "qwen2":
                assert torch.equal(mine.bias, theirs.bias)
        assert torch.equal(drafter.midlayer.mlp.down_proj.weight, last.mlp.down_proj.weight)
        assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())
        drafter.check_fits(policy.config)

    def test_starts_as_the_last_layer_of_the_policy(self, policy):
        """The embedding half is silent, so it continues the last auxiliary state as the policy's last layer does."""
        drafter = Drafter.from_policy(policy)
        input_ids = torch.arange(10)[None]
        with torch.no_grad():
            output = policy(input_ids, output_hidden_states=True)
            aux = torch.cat([output.hidden_states[layer] for layer in (1, 2, 3)], dim=-1)
            logits = drafter(torch.zeros(1, 10, 64), aux)
        assert_close(logits, output.logits, forward_operations(policy.config, num_tokens=10))

    def test_leaves_the_random_state_alone(self, policy):
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        Drafter.from_policy(policy)
        assert torch.equal(torch.rand(4), expected)

    def test_inside_peft(self, policy):
        from peft import LoraConfig, get_peft_model

        expected = Drafter.from_policy(policy).state_dict()
        wrapped = get_peft_model(policy, LoraConfig(target_modules=["q_proj", "down_proj"]))
        drafter = Drafter.from_policy(wrapped)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in drafter.state_dict().items())

    @pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_reads_nothing_but_what_it_says(self, make_policy, kind, tied):
        from peft import LoraConfig, get_peft_model

        policy = make_policy(kind, tied)
        expected = Drafter.from_policy(policy).state_dict()
        policy = get_peft_model(policy, LoraConfig(target_modules=["q_proj", "down_proj"]))
        read = {id(parameter) for parameter in parameters_to_read(policy)}
        others = [parameter for parameter in policy.parameters() if id(parameter) not in read]
        assert len(others) > len(read)
        for parameter in others:
            parameter.data.fill_(float("nan"))
        drafter = Drafter.from_policy(policy)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in drafter.state_dict().items())

    def test_no_language_model_inside(self):
        with pytest.raises(ValueError, match="Linear"):
            Drafter.from_policy(torch.nn.Linear(2, 2))

    @pytest.mark.parametrize(
        "draft_token_ids",
        [torch.tensor([3, 1, 2]), torch.tensor([1, 1, 2]), torch.tensor([1, 128]), torch.arange(129)],
    )
    def test_bad_draft_token_ids(self, policy, draft_token_ids):
        with pytest.raises(ValueError, match="draft_token_ids|draft_vocab_size"):
            Drafter.from_policy(policy, draft_token_ids)


class TestForward:
    def test_is_causal(self, make_drafter):
        drafter = make_drafter()
        embeds, aux = random_inputs()
        before = drafter(embeds, aux)
        for tensor in (embeds, aux):
            changed = tensor.clone()
            changed[:, 6:] += 1.0
            after = drafter(changed, aux) if tensor is embeds else drafter(embeds, changed)
            assert torch.equal(after[:, :6], before[:, :6])
            assert (after[:, 6:] != before[:, 6:]).any(dim=-1).all()

    def test_rows_of_a_batch_do_not_see_each_other(self, make_drafter):
        drafter = make_drafter()
        (embeds, aux), (other_embeds, other_aux) = random_inputs(seed=0), random_inputs(seed=1)
        both = drafter(torch.cat([embeds, other_embeds]), torch.cat([aux, other_aux]))
        assert_close(both[:1], drafter(embeds, aux), forward_operations(drafter.config, num_tokens=9))

    def test_first_proposal_is_the_best_token_of_forward(self, make_drafter, policy):
        drafter = make_drafter(draft_token_ids=torch.arange(1, 128, 2))
        embed_tokens = policy.get_input_embeddings().weight.detach()
        input_ids, (_, aux) = torch.arange(20, 30), random_inputs()
        logits = drafter(embed_tokens[input_ids[1:]][None], aux)
        proposed = drafter.propose(input_ids, aux[0], embed_tokens, num_tokens=3)
        assert proposed.shape == (3,)
        assert (proposed % 2 == 1).all()  # only tokens of the reduced vocabulary
        assert proposed[0] == drafter.draft_token_ids[logits[0, -1].argmax()]


class TestVllmWeights:
    def test_never_holds_the_shared_embedding(self, make_drafter):
        names = [name for name, _ in make_drafter().vllm_weights()]
        assert not any("embed_tokens" in name for name in names)

    def test_mapping_only_for_a_reduced_vocabulary(self, make_drafter):
        assert "d2t" not in dict(make_drafter().vllm_weights())
        drafter = make_drafter(draft_token_ids=torch.tensor([2, 5, 100]))
        weights = dict(drafter.vllm_weights())
        assert weights["d2t"].tolist() == [2, 4, 98]
        assert weights["t2d"].nonzero().flatten().tolist() == [2, 5, 100]
        assert not any(tensor.requires_grad for tensor in weights.values())


class TestCheckFits:
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"hidden_size": 128}, "hidden_size=64, but the policy has hidden_size=128"),
            ({"vocab_size": 200}, "vocab_size=128, but the policy has vocab_size=200"),
            ({"num_hidden_layers": 3}, "between 0 and 2"),
            ({"num_hidden_layers": 9}, "target_num_hidden_layers=4.*num_hidden_layers=9"),
        ],
    )
    def test_names_the_field(self, policy, change, named):
        drafter = Drafter.from_policy(policy)
        config = LlamaConfig(**policy.config.to_dict() | change)
        with pytest.raises(ValueError, match=named):
            drafter.check_fits(config)

    def test_names_the_target_hidden_size(self, policy):
        config = DrafterConfig.from_policy_config(policy.config)
        config.target_hidden_size = 32
        with pytest.raises(ValueError, match="target_hidden_size=32"):
            Drafter(config).check_fits(policy.config)
