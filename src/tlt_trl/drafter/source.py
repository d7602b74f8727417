"""Where the drafter of a run comes from."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from .dataset_tokens import count_tokens
from .initialization import parameters_to_read
from .modeling_drafter import Drafter
from .vocabulary import default_draft_vocab_size, most_frequent_token_ids


def build_drafter(
    policy: PreTrainedModel,
    *,
    given: Drafter | None,
    name_or_path: str | None,
    vocab_size: int | None,
    train_dataset: Iterable[dict[str, Any]] | None,
    tokenizer: Any,
    gather_params: Callable[[list[nn.Parameter]], AbstractContextManager],
) -> Drafter:
    """
    The drafter that is given, or one that is loaded, or else one that is initialised from the policy.

    Args:
        policy ([`~transformers.PreTrainedModel`]):
            The policy, possibly inside a PEFT wrapper.
        given ([`Drafter`], *optional*):
            Taken as it is.
        name_or_path (`str`, *optional*):
            Folder or Hub id of a drafter, when none is given.
        vocab_size (`int`, *optional*):
            Size of the draft vocabulary of a drafter that is initialised, which begins with the most frequent tokens
            of `train_dataset`. `None` means [`~tlt_trl.drafter.vocabulary.default_draft_vocab_size`].
        train_dataset (`Iterable[dict]`, *optional*):
            Rows with texts or conversations.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.
        gather_params (`Callable[[list[nn.Parameter]], ContextManager]`):
            Context in which parameters that a back end keeps in pieces are whole.

    Returns:
        [`Drafter`]: In fp32, on the device where it was made.

    Raises:
        `ValueError`: If it does not fit the policy, or its vocabulary cannot be counted.
    """
    base = policy.get_base_model() if is_peft_model(policy) else policy
    if given is not None:
        drafter = given
    elif name_or_path is not None:
        drafter = Drafter.from_pretrained(name_or_path, base.config)
    else:
        size = base.config.get_text_config().vocab_size
        ids = _draft_token_ids(size, vocab_size, train_dataset, tokenizer)
        # Under ZeRO-3 the policy is in pieces already, and need not fit on one device as a whole.
        with gather_params(parameters_to_read(base)):
            drafter = Drafter.from_policy(base, draft_token_ids=ids)
    drafter.check_fits(base.config)
    return drafter.to(torch.float32)


def _draft_token_ids(
    policy_vocab_size: int, size: int | None, train_dataset: Iterable[dict[str, Any]] | None, tokenizer: Any
) -> Tensor | None:
    size = default_draft_vocab_size(policy_vocab_size) if size is None else size
    if size == policy_vocab_size:
        return None
    if size > policy_vocab_size:
        raise ValueError(
            f"`drafter_vocab_size` is {size}, larger than the policy's vocabulary of {policy_vocab_size}. Set it to "
            f"{policy_vocab_size} to draft over the whole vocabulary."
        )
    # Of tokens that are not counted, those with small ids come first, which tokenizers have learned first.
    counts = count_tokens(train_dataset or [], tokenizer, policy_vocab_size)
    return most_frequent_token_ids(counts, size, always=tokenizer.all_special_ids)
