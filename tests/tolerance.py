"""
How far two float computations of the same numbers may be apart; every such comparison of the tests takes it from here.

Rounding one operation is off by up to `eps / 2` of its result. A sum of n products, taken in another order or by
another kernel, is therefore off by n such errors, whose signs are as good as random: about `eps * sqrt(n) * scale`,
where `scale` is the size of the numbers that are added. Sums in sequence (the layers of a model) add theirs the same
way, so n counts all products on the way to one number. `SAFETY` stands for what this leaves out: the largest of
thousands of entries is compared, not a typical one, and functions between the sums (softmax, norms) may enlarge an
error. Where the tests were measured, the errors stayed below an eighth of it.

Another machine has other kernels or another number of threads, which change the order of additions and nothing else:
a test with a derived tolerance passes there as well. A real mistake is orders of magnitude larger.
"""

import math

import torch
from transformers import PretrainedConfig


SAFETY = 8.0


def tolerance(dtype: torch.dtype, num_operations: int, scale: float) -> float:
    """
    Largest absolute difference that rounding explains.

    Args:
        dtype (`torch.dtype`):
            The coarsest float that the numbers pass through.
        num_operations (`int`):
            Products that are added up on the way to one number, see [`forward_operations`] for a model.
        scale (`float`):
            Size of the largest numbers that are added: of the result, unless large terms cancel in it.
    """
    return SAFETY * torch.finfo(dtype).eps * math.sqrt(num_operations) * scale


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    num_operations: int,
    scale: float | None = None,
    computed_in: torch.dtype | None = None,
) -> None:
    """
    Asserts that two tensors of one dtype and shape differ by no more than their [`tolerance`].

    Args:
        actual, expected (`torch.Tensor`):
            What was computed in two ways.
        num_operations (`int`), scale (`float`, *optional*):
            See [`tolerance`]; `scale` defaults to the largest entry of `expected`.
        computed_in (`torch.dtype`, *optional*):
            A finer dtype than that of the tensors, which were rounded to theirs once, at the end: where that falls on
            either side they differ by one unit more, relative to each entry.
    """
    largest = expected.detach().abs().max().item() if expected.numel() else 0.0
    dtype = expected.dtype if computed_in is None else computed_in
    limit = tolerance(dtype, num_operations, largest if scale is None else scale)
    unit = 0.0 if computed_in is None else torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=unit, atol=limit)


def forward_operations(config: PretrainedConfig, num_tokens: int) -> int:
    """
    Products on the way to one logit of a decoder.

    Args:
        config (`transformers.PretrainedConfig`):
            Configuration of the policy or the drafter.
        num_tokens (`int`):
            Keys that the last token attends to.
    """
    hidden_size = config.hidden_size
    # Projections, scores, values, output; then the MLP.
    layer = hidden_size + hidden_size + num_tokens + hidden_size + hidden_size + config.intermediate_size
    return config.num_hidden_layers * layer + hidden_size


def forward_roundings(config: PretrainedConfig) -> int:
    """
    Roundings on the way to one logit of a decoder in bfloat16, whose kernels add up in float32 and round the result.

    Args:
        config (`transformers.PretrainedConfig`):
            Configuration of the policy.
    """
    # Of a layer: two norms, query, key and value, rotation, attention, output, gate and up, product, down, two sums.
    return 12 * config.num_hidden_layers + 2


def typical_difference(dtype: torch.dtype, num_operations: int, scale: float) -> float:
    """
    As [`tolerance`], for the root mean square over many entries: none of them has to be the largest of thousands.

    Args:
        dtype (`torch.dtype`), num_operations (`int`):
            See [`tolerance`]; for sums that are rounded once at their end, the number of roundings.
        scale (`float`):
            Root mean square of the numbers.
    """
    return 2.0 * torch.finfo(dtype).eps * math.sqrt(num_operations) * scale


def logprob_tolerance(temperature: float = 1.0) -> float:
    """
    Tolerance for log-probs of a policy of `conftest.save_tiny_policy`, in float32, from engine and Hugging Face model.

    It has at most 4 layers of width 64 (MLP 128) and rows of at most 64 tokens. Its logits are about normal with a
    deviation of `spread * sqrt(64) = 2.4`, so that log-probs stay above -20. Those of other weights, or shifted by a
    token, would be off by about 1.
    """
    hidden_size, intermediate_size, num_layers, num_tokens, largest = 64, 128, 4, 64, 20.0
    operations = num_layers * (4 * hidden_size + num_tokens + intermediate_size) + hidden_size
    return tolerance(torch.float32, operations, scale=largest / temperature)
