"""
The drafter: one EAGLE-3 decoder layer on top of the policy's hidden states (arXiv 2503.01840, used by TLT 2511.16665).

Position t sees the policy's states at t and the embedding of token t+1, and predicts token t+2. Module and parameter
names are those of EAGLE-3 checkpoints, so the state dict is the file the engines load.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    rotate_half,
)

from .checkpoint import DrafterSnapshot, drafter_from_checkpoint, run_facts
from .configuration_drafter import DrafterConfig, checked_layer_ids
from .hub import push_snapshot, upload
from .initialization import drafter_from_policy


class DrafterAttention(nn.Module):
    """Projections of the attention. Their input is twice as wide as in Llama: `[embedding, hidden state]`."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_size, bias=config.attention_bias)
        # vLLM's Llama attention gives o_proj a bias together with q, k and v.
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)

    def query(self, inputs: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """`inputs` of shape (N, 2H) to rotated queries of shape (heads, N, head_dim)."""
        return _rotate(self.q_proj(inputs).view(-1, self.num_heads, self.head_dim), rotary).transpose(0, 1)

    def key_value(self, inputs: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """`inputs` of shape (N, 2H) to rotated keys and values, each of shape (kv_heads, N, head_dim)."""
        key = _rotate(self.k_proj(inputs).view(-1, self.num_kv_heads, self.head_dim), rotary)
        value = self.v_proj(inputs).view(-1, self.num_kv_heads, self.head_dim)
        return key.transpose(0, 1), value.transpose(0, 1)

    def output(self, attended: Tensor) -> Tensor:
        """`attended` of shape (heads, N, head_dim) to (N, H)."""
        return self.o_proj(attended.transpose(0, 1).flatten(1))


class DrafterLayer(nn.Module):
    """The decoder layer in two halves, so that the caller chooses which rows attend to which keys."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.self_attn = DrafterAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def attention_inputs(self, embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """Embeddings and hidden states, each (N, H), normalised separately and concatenated: (N, 2H)."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden_states)], dim=-1)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """
        Everything after the attention.

        Returns the hidden states *before* the final norm, of shape (N, H): the tensor that vLLM feeds back in the next
        draft step (`hidden_prenorm` in its `llama_eagle3.py`).
        """
        hidden_states = residual + self.self_attn.output(attended)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Drafter(PreTrainedModel):
    """
    EAGLE-3 drafter. It owns no embedding: the policy's is passed in by the trainer and shared by the engine.

    Args:
        config ([`DrafterConfig`]):
            See [`DrafterConfig.from_policy_config`].
        draft_token_ids (`torch.LongTensor` of shape (draft_vocab_size,), *optional*):
            Sorted policy token ids that the drafter can propose. Needed for a reduced vocabulary, unless the buffers
            are loaded from a checkpoint.

    The buffers `d2t` (`policy_id = draft_id + d2t[draft_id]`) and `t2d` (whether a policy token can be drafted) are
    saved with the weights and never recomputed.
    """

    config_class = DrafterConfig
    base_model_prefix = ""
    _no_split_modules = ["DrafterLayer"]
    _supports_sdpa = True

    def __init__(self, config: DrafterConfig, draft_token_ids: Tensor | None = None):
        super().__init__(config)
        hidden_size = config.hidden_size
        # The configuration has both set by now, whatever was given.
        aux_size = config.num_aux_hidden_states * config.target_hidden_size  # type: ignore[operator]
        self.fc = nn.Linear(aux_size, hidden_size, bias=False)
        self.midlayer = DrafterLayer(config)
        self.norm = LlamaRMSNorm(hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden_size, config.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(config.head == "own")
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if draft_token_ids is None:
            draft_token_ids = torch.arange(config.draft_vocab_size)
        _check_draft_token_ids(draft_token_ids, config)
        self.register_buffer("d2t", draft_token_ids.long() - torch.arange(config.draft_vocab_size))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.t2d[draft_token_ids] = True
        self.post_init()

    @property
    def draft_token_ids(self) -> Tensor:
        """Policy token id of every draft token, of shape (draft_vocab_size,)."""
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    @property
    def has_full_vocabulary(self) -> bool:
        return self.config.draft_vocab_size == self.config.vocab_size

    @classmethod
    def from_policy(
        cls,
        policy: nn.Module,
        draft_token_ids: Tensor | None = None,
        aux_hidden_state_layer_ids: Sequence[int] | None = None,
        head: str = "policy",
    ) -> "Drafter":
        """
        A drafter that starts from the weights of a policy, in fp32, without touching any random state.

        Args:
            policy (`torch.nn.Module`):
                Llama, Mistral, Qwen2 or Qwen3 causal language model, tied or untied, possibly inside a PEFT wrapper.
            draft_token_ids (`torch.LongTensor`, *optional*):
                Sorted policy token ids of the reduced vocabulary, see
                [`~tlt_trl.drafter.vocabulary.most_frequent_token_ids`]. `None` keeps the whole vocabulary.
            aux_hidden_state_layer_ids (`Sequence[int]`, *optional*):
                Policy layers to read.
            head (`str`, *optional*, defaults to `"policy"`):
                `"own"`: a head that is trained with the drafter, `"policy"`: the policy's, which is not.
        """
        return drafter_from_policy(cls, policy, draft_token_ids, aux_hidden_state_layer_ids, head)

    def trained_parameters(self) -> list[nn.Parameter]:
        """What training changes: all but a head that is the policy's."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def choose_vocabulary(self, draft_token_ids: Tensor) -> None:
        """
        Drafts over other tokens from now on, with the policy's head.

        Args:
            draft_token_ids (`torch.LongTensor` of shape (draft_vocab_size,)):
                Sorted policy token ids, as many as before. [`copy_head`] must follow.

        Raises:
            `ValueError`: If the drafter has a head of its own, which was trained for its tokens.
        """
        if self.config.head != "policy":
            raise ValueError("A head of its own is trained for its tokens; only the policy's head can get others.")
        _check_draft_token_ids(draft_token_ids, self.config)
        self.d2t.copy_(draft_token_ids - torch.arange(self.config.draft_vocab_size, device=draft_token_ids.device))
        self.t2d.zero_()
        self.t2d[draft_token_ids] = True

    @torch.no_grad()
    def copy_head(self, policy_head: Tensor) -> None:
        """Takes the rows of the draft vocabulary from a policy's head, of shape (vocab_size, hidden_size)."""
        self.lm_head.weight.copy_(policy_head[self.draft_token_ids.to(policy_head.device)])

    def rotary(self, position_ids: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for `position_ids` of shape (N,): each (N, 1, head_dim), in the dtype of `like`."""
        cos, sin = self.rotary_emb(like, position_ids=position_ids[None])
        return cos[0, :, None], sin[0, :, None]

    def forward(self, embeds: Tensor, aux_hidden_states: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """
        First draft step of whole sequences (the engine's prefill), with dense causal attention.

        Args:
            embeds (`torch.Tensor` of shape (batch_size, seq_len, hidden_size)):
                Policy embeddings of tokens 1 … seq_len, that is of the *next* token at every position.
            aux_hidden_states (`torch.Tensor` of shape (batch_size, seq_len, num_aux_hidden_states * hidden_size)):
                Policy states at positions 0 … seq_len - 1.
            position_ids (`torch.Tensor` of shape (seq_len,), *optional*):
                Defaults to 0 … seq_len - 1.

        Returns:
            `torch.Tensor` of shape (batch_size, seq_len, draft_vocab_size): logits for tokens 2 … seq_len + 1.
        """
        if position_ids is None:
            position_ids = torch.arange(embeds.shape[1], device=embeds.device)
        rows = [self._prefill(e, self.fc(a), position_ids)[0] for e, a in zip(embeds, aux_hidden_states, strict=True)]
        return self.lm_head(self.norm(torch.stack(rows)))

    def _prefill(self, embeds: Tensor, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One sequence: hidden states before the final norm (T, H), keys and values (kv_heads, T, head_dim)."""
        rotary = self.rotary(position_ids, hidden_states)
        inputs = self.midlayer.attention_inputs(embeds, hidden_states)
        query = self.midlayer.self_attn.query(inputs, rotary)
        key, value = self.midlayer.self_attn.key_value(inputs, rotary)
        attended = _attend(query, key, value, is_causal=True)
        return self.midlayer.finish(attended, hidden_states), key, value

    @torch.no_grad()
    def propose(self, input_ids: Tensor, aux_hidden_states: Tensor, embed_tokens: Tensor, num_tokens: int) -> Tensor:
        """
        Greedy draft tokens, one by one with a key/value cache: a plain version of what the engine does.

        Args:
            input_ids (`torch.Tensor` of shape (seq_len + 1,)):
                Tokens so far, the last one sampled from the policy and not yet forwarded through it.
            aux_hidden_states (`torch.Tensor` of shape (seq_len, num_aux_hidden_states * hidden_size)):
                Policy states at the first `seq_len` tokens.
            embed_tokens (`torch.Tensor` of shape (vocab_size, hidden_size)):
                The policy's embedding.
            num_tokens (`int`):
                How many tokens to draft.

        Returns:
            `torch.Tensor` of shape (num_tokens,): policy token ids.
        """
        seq_len = aux_hidden_states.shape[0]
        position_ids = torch.arange(seq_len, device=input_ids.device)
        hidden, keys, values = self._prefill(embed_tokens[input_ids[1:]], self.fc(aux_hidden_states), position_ids)
        hidden = hidden[-1:]  # shape: [1, hidden_size]
        tokens: list[Tensor] = []
        for step in range(num_tokens):
            if step > 0:
                rotary = self.rotary(position_ids[-1:] + step, hidden)
                inputs = self.midlayer.attention_inputs(embed_tokens[tokens[-1]], hidden)
                key, value = self.midlayer.self_attn.key_value(inputs, rotary)
                keys, values = torch.cat([keys, key], dim=1), torch.cat([values, value], dim=1)
                attended = _attend(self.midlayer.self_attn.query(inputs, rotary), keys, values, is_causal=False)
                hidden = self.midlayer.finish(attended, hidden)
            draft_ids = self.lm_head(self.norm(hidden)).argmax(dim=-1)  # shape: [1]
            tokens.append(draft_ids + self.d2t[draft_ids])
        return torch.cat(tokens)

    def vllm_weights(self) -> Iterable[tuple[str, Tensor]]:
        """
        Names and tensors in the layout of an EAGLE-3 checkpoint, for `load_weights` of the engine's drafter.

        `embed_tokens` is never included: the engine's drafter shares the policy's embedding, so a push would overwrite
        it, as in TLT's public code. For a full vocabulary `d2t` is left out, because vLLM has no such parameter then.
        """
        for name, tensor in self.state_dict().items():
            if self.has_full_vocabulary and name in ("d2t", "t2d"):
                continue
            yield name, tensor.detach()

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        *,
        dtype: torch.dtype | None = None,
        provenance: Mapping[str, Any] | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **hub_kwargs: Any,
    ) -> None:
        """
        Saves the drafter in the EAGLE-3 layout that vLLM and SGLang load directly, and reads it back.

        Args:
            save_directory (`str` or `os.PathLike`):
                Folder to write to, created if missing.
            dtype (`torch.dtype`, *optional*):
                Dtype of the saved weights. Defaults to their current one. bf16 halves the file and is what most
                engines run in; fp32 is needed to continue training.
            provenance (`Mapping[str, Any]`, *optional*):
                What it was trained from (policy, steps, tokens …), anything that JSON can hold; kept in
                `provenance.json` beside versions and command line.
            push_to_hub (`bool`, *optional*, defaults to `False`):
                Whether to push the folder to the Hub as well.
            repo_id (`str`, *optional*):
                Repository to push to. Defaults to the name of the folder.
            **hub_kwargs:
                Arguments of [`~Drafter.push_to_hub`].

        Raises:
            `OSError`: If what is read back differs from what was written.
        """
        os.makedirs(save_directory, exist_ok=True)
        DrafterSnapshot.of(self, dtype).write(save_directory, run_facts() | dict(provenance or {}))
        if push_to_hub:
            upload(save_directory, repo_id or os.path.basename(os.path.abspath(save_directory)), **hub_kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        policy_config: PretrainedConfig | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> "Drafter":
        """
        Loads a drafter from a folder or from the Hub, without touching any random state.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`):
                Folder or Hub id of a saved drafter, or of an EAGLE-3 head in the layout of its authors, of SpecForge
                or of speculators. Safetensors come first; of `pytorch_model*.bin` only tensors are read.
            policy_config ([`~transformers.PretrainedConfig`], *optional*):
                Configuration of the policy to draft for. The drafter is checked against it. Needed if the checkpoint
                does not say which layers of the policy it reads.
            dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
                Dtype of the parameters. Training needs fp32.
            revision (`str`, *optional*):
                Branch, tag or commit on the Hub.
            token (`str` or `bool`, *optional*):
                Token for the Hub.

        Raises:
            `ValueError`: If it is not an EAGLE-3 head, is damaged, or does not fit; the message names every
            difference.
        """
        return drafter_from_checkpoint(cls, pretrained_model_name_or_path, policy_config, dtype, revision, token)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        dtype: torch.dtype | None = None,
        provenance: Mapping[str, Any] | None = None,
        **hub_kwargs: Any,
    ) -> CommitInfo:
        """
        Pushes the drafter and a model card to a repository of its own on the Hub.

        Args:
            repo_id (`str`):
                Repository, created if missing.
            dtype, provenance:
                As in [`~Drafter.save_pretrained`].
            **hub_kwargs:
                `private`, `revision`, `token` and `commit_message`, see [`~tlt_trl.drafter.hub.upload`].

        Returns:
            [`~huggingface_hub.CommitInfo`]: The commit.
        """
        snapshot = DrafterSnapshot.of(self, dtype)
        return push_snapshot(snapshot, repo_id, run_facts() | dict(provenance or {}), **hub_kwargs)

    def check_fits(self, policy_config: PretrainedConfig) -> None:
        """Raises a `ValueError` that names the field in which this drafter does not fit a policy."""
        for field in ("hidden_size", "vocab_size"):
            mine, wanted = self.config.to_dict()[field], policy_config.to_dict()[field]
            if mine != wanted:
                raise ValueError(
                    f"The drafter does not fit the policy: {field}={mine}, but the policy has {field}={wanted}. "
                    f"Use a drafter trained for this policy, or make one with `Drafter.from_policy`."
                )
        if self.config.target_hidden_size != policy_config.hidden_size:
            raise ValueError(
                f"The drafter does not fit the policy: target_hidden_size={self.config.target_hidden_size}, "
                f"but the policy has hidden_size={policy_config.hidden_size}."
            )
        checked_layer_ids(self.config.eagle_aux_hidden_state_layer_ids, policy_config.num_hidden_layers)
        trained_for = self.config.target_num_hidden_layers
        if trained_for is not None and trained_for != policy_config.num_hidden_layers:
            raise ValueError(
                f"The drafter does not fit the policy: target_num_hidden_layers={trained_for}, but the policy has "
                f"num_hidden_layers={policy_config.num_hidden_layers}."
            )


def _check_draft_token_ids(draft_token_ids: Tensor, config: DrafterConfig) -> None:
    if draft_token_ids.shape != (config.draft_vocab_size,):
        raise ValueError(
            f"draft_token_ids has shape {tuple(draft_token_ids.shape)}, but draft_vocab_size="
            f"{config.draft_vocab_size}."
        )
    if config.draft_vocab_size > config.vocab_size:
        raise ValueError(f"draft_vocab_size={config.draft_vocab_size} is larger than vocab_size={config.vocab_size}.")
    sorted_once = bool((draft_token_ids[1:] > draft_token_ids[:-1]).all())
    if not sorted_once or draft_token_ids[0] < 0 or draft_token_ids[-1] >= config.vocab_size:
        raise ValueError(
            f"draft_token_ids must be sorted, without repeats, and between 0 and {config.vocab_size - 1}."
        )


def _rotate(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotary
    return states * cos + rotate_half(states) * sin


def _attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """Plain attention of one sequence; shapes (heads, T, head_dim), fewer heads for keys and values."""
    return F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=is_causal, enable_gqa=True)[0]
