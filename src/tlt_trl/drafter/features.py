"""
Copies hidden states of the policy out of its own forward passes: no extra pass, no change to the passes.

TLT (arXiv 2511.16665) caches the states of the log-prob pass. Its public code misaligns them: it removes left padding
from the states, but not from the tokens. Here the attention mask removes padding from both.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .feature_buffer import FeatureBuffer, FeatureSample
from .initialization import inner_language_model


__all__ = ["FeatureBuffer", "FeatureRecorder", "FeatureSample"]


@dataclass
class _Recording:
    """What one `recording` block announced and has seen so far."""

    input_ids: Tensor  # shape: [num_rows, seq_len]
    attention_mask: Tensor  # shape: [num_rows, seq_len], bool
    prompt_lengths: list[int]  # of every row, without padding
    wanted: set[int]  # rows to keep
    step: int
    next_row: int = 0


def rows_to_keep(lengths: Sequence[int], prompt_lengths: Sequence[int], max_tokens: int) -> set[int]:
    """
    Rows worth copying: of those with a completion token to predict, the longest answers that fit into the buffer
    together. The buffer would drop the others anyway, and until then they would take up (pinned) memory.

    Args:
        lengths (`Sequence[int]`):
            Tokens of every row, prompt and completion.
        prompt_lengths (`Sequence[int]`):
            Tokens of its prompt.
        max_tokens (`int`):
            Capacity of the buffer.
    """
    answers = [length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]
    rows = [row for row, length in enumerate(lengths) if answers[row] >= 1 and 3 <= length <= max_tokens]
    kept = set()
    for row in sorted(rows, key=lambda row: -answers[row]):
        max_tokens -= lengths[row]
        if max_tokens < 0:
            break
        kept.add(row)
    return kept


class FeatureRecorder:
    """
    Copies hidden states from a policy's forward passes into a [`FeatureBuffer`].

    The hooks do nothing outside [`recording`][FeatureRecorder.recording], or when gradient checkpointing re-runs
    layers, because a re-run does not call the decoder around them.

    Args:
        policy (`torch.nn.Module`):
            The policy, bare or inside PEFT, DDP or FSDP wrappers.
        aux_hidden_state_layer_ids (`Sequence[int]`):
            Layers whose inputs are copied, `eagle_aux_hidden_state_layer_ids` of the drafter. The input of a Hugging
            Face decoder layer is the sum (hidden + residual) that vLLM takes before the layer of that index.
        buffer ([`FeatureBuffer`]):
            Where the samples go.
    """

    def __init__(self, policy: nn.Module, aux_hidden_state_layer_ids: Sequence[int], buffer: FeatureBuffer):
        decoder = inner_language_model(policy).get_decoder()
        self.buffer = buffer
        self._layer_ids = list(aux_hidden_state_layer_ids)
        self._recording: _Recording | None = None
        self._in_forward = False
        self._aux: dict[int, Tensor] = {}
        self._samples: list[FeatureSample] = []
        self._capture_s = 0.0
        self._handles = [decoder.register_forward_pre_hook(self._begin_forward)]
        for layer_id in self._layer_ids:
            hook = self._layer_hook(layer_id)
            self._handles.append(decoder.layers[layer_id].register_forward_pre_hook(hook, with_kwargs=True))
        self._handles.append(decoder.norm.register_forward_hook(self._end_forward))

    @contextmanager
    def recording(
        self, input_ids: Tensor, attention_mask: Tensor, completion_mask_or_prompt_length: Tensor | int, step: int
    ) -> Iterator[None]:
        """
        Record the forward passes inside the block. Their rows must be those of `input_ids`, in order, in any number of
        mini batches. The samples enter the buffer at the end of the block.

        Args:
            input_ids (`torch.Tensor` of shape (num_rows, seq_len)):
                Left-padded prompts followed by right-padded completions.
            attention_mask (`torch.Tensor` of shape (num_rows, seq_len)):
                1 for real tokens.
            completion_mask_or_prompt_length (`torch.Tensor` or `int`):
                Mask of the completion part, of shape (num_rows, completion_len), or the padded length of the prompts.
            step (`int`):
                Training step, from which the buffer computes the age of the samples.
        """
        if isinstance(completion_mask_or_prompt_length, int):
            prompt_width = completion_mask_or_prompt_length
        else:
            prompt_width = input_ids.shape[1] - completion_mask_or_prompt_length.shape[1]
        mask = attention_mask.bool()
        prompt_lengths = mask[:, :prompt_width].sum(dim=1).tolist()
        lengths = mask.sum(dim=1).tolist()
        wanted = rows_to_keep(lengths, prompt_lengths, self.buffer.max_tokens)
        self._recording = recording = _Recording(input_ids, mask, prompt_lengths, wanted, step)
        try:
            yield
            self._deliver(recording.input_ids.device)
        finally:
            self._recording = None
            self._in_forward = False
            self._aux.clear()
            self._samples = []

    def pop_capture_seconds(self) -> float:
        """Seconds spent on copying states and putting them into the buffer since the last call."""
        seconds, self._capture_s = self._capture_s, 0.0
        return seconds

    def remove(self) -> None:
        """Take the hooks off the policy."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin_forward(self, module: nn.Module, args: tuple) -> None:
        self._in_forward = self._recording is not None

    def _layer_hook(self, layer_id: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            if self._in_forward:
                self._aux[layer_id] = (args[0] if args else kwargs["hidden_states"]).detach()

        return hook

    def _end_forward(self, module: nn.Module, args: tuple, output: Tensor) -> None:
        recording = self._recording
        if recording is None or not self._in_forward:
            return
        self._in_forward = False
        started = time.perf_counter()
        self._copy_rows(recording, output.detach())
        self._aux.clear()
        self._capture_s += time.perf_counter() - started

    @torch.no_grad()
    def _copy_rows(self, recording: "_Recording", last_hidden_state: Tensor) -> None:
        first, count = recording.next_row, last_hidden_state.shape[0]
        num_rows, seq_len = recording.input_ids.shape
        if last_hidden_state.shape[1] != seq_len or first + count > num_rows:
            raise ValueError(
                f"FeatureRecorder was told of {num_rows} rows of {seq_len} tokens and has seen {first}, but the "
                f"policy was now called with {count} rows of {last_hidden_state.shape[1]}. Only "
                f"forward passes over the announced rows may run inside `recording`."
            )
        recording.next_row += count
        for offset in range(count):
            row = first + offset
            if row not in recording.wanted:
                continue
            mask = recording.attention_mask[row]
            aux = torch.cat([self._aux[layer_id][offset][mask] for layer_id in self._layer_ids], dim=-1)
            self._samples.append(
                FeatureSample(
                    input_ids=self._to_cpu(recording.input_ids[row][mask], torch.long),
                    aux_hidden_states=self._to_cpu(aux, torch.bfloat16),
                    last_hidden_state=self._to_cpu(last_hidden_state[offset][mask], torch.bfloat16),
                    prompt_length=recording.prompt_lengths[row],
                    step=recording.step,
                )
            )

    def _to_cpu(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy in CPU memory; from CUDA into pinned memory, without waiting for the transfer."""
        pinned = tensor.device.type == "cuda"
        target = torch.empty(tensor.shape, dtype=dtype, pin_memory=pinned)
        return target.copy_(tensor, non_blocking=pinned)

    def _deliver(self, device: torch.device) -> None:
        started = time.perf_counter()
        if self._samples and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        for sample in self._samples:
            self.buffer.add(sample)
        self._capture_s += time.perf_counter() - started
