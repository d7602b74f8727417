"""
Drafting without a model: the draft is what followed the same tokens in the sample itself, in other answers of its
group, or in earlier answers to the same prompt.

TLT (arXiv 2511.16665) falls back to such a lookup while no trained drafter exists. Standard library only.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Text:
    """The last few tokens of a prompt, then those of one answer; positions before `indexed` are in the index."""

    tokens: list[int]
    indexed: int


@dataclass(slots=True)
class _History:
    """One prompt, then all answers to it. `index` maps an n-gram to the text and position that last followed it."""

    texts: list[_Text] = field(default_factory=list)
    index: dict[tuple[int, ...], tuple[list[int], int]] = field(default_factory=dict)
    not_indexed: list[_Text] = field(default_factory=list)
    num_tokens: int = 0


class LookupDrafter:
    """
    Looks draft tokens up in what was already written after the same prompt.

    The last `n` tokens of a sample are looked for, longest `n` first, in the prompt, in the sample itself and in every
    other answer to the prompt, those of earlier epochs included; the tokens that followed the most recent occurrence
    are the draft. The sampled distribution stays the policy's, whatever they are: a draft does not depend on tokens
    that are sampled after it.

    Text is only indexed when a draft is asked for, so a drafter that is never used costs no more than a copy of the
    answers.

    Args:
        orders (`Sequence[int]`, *optional*, defaults to `(4, 3, 2)`):
            Lengths of the n-grams, longest first. Shorter ones match more often and are right less often.
        max_tokens (`int`, *optional*, defaults to `262144`):
            Tokens kept from one rollout to the next, over all prompts; the prompts used longest ago are forgotten
            first. A token takes about 100 bytes of memory for each order.
        max_tokens_per_prompt (`int`, *optional*, defaults to `32768`):
            The same for one prompt; beyond them the older half of its answers is forgotten.
    """

    def __init__(self, orders: Sequence[int] = (4, 3, 2), max_tokens: int = 2**18, max_tokens_per_prompt: int = 2**15):
        if not orders or list(orders) != sorted(set(orders), reverse=True) or orders[-1] < 1:
            raise ValueError(f"orders={tuple(orders)} must fall strictly and be at least 1, such as (4, 3, 2).")
        self.orders = tuple(orders)
        self.max_tokens = max_tokens
        self.max_tokens_per_prompt = max_tokens_per_prompt
        self.num_tokens = 0
        self._histories: OrderedDict[tuple[int, ...], _History] = OrderedDict()
        self._running: dict[str, tuple[_History, _Text]] = {}

    @property
    def num_running(self) -> int:
        """Samples that draft tokens were proposed for and that are not finished."""
        return len(self._running)

    def propose(
        self, request_id: str, prompt: Sequence[int], answer: Sequence[int], num_draft_tokens: int
    ) -> list[int]:
        """
        Draft tokens that may follow `answer`.

        Args:
            request_id (`str`):
                Name of the sample, the same in every call for it.
            prompt (`Sequence[int]`):
                Token ids of its prompt.
            answer (`Sequence[int]`):
                Token ids sampled so far; between calls it only grows.
            num_draft_tokens (`int`):
                Largest number of draft tokens.

        Returns:
            `list[int]`: At most `num_draft_tokens` token ids; empty where nothing matches.
        """
        if request_id not in self._running:
            self._running[request_id] = self._add_answer(prompt)
        history, text = self._running[request_id]
        self._extend(history, text, self._tail(prompt), answer)
        for earlier in history.not_indexed:
            self._index(history, earlier)
        history.not_indexed.clear()
        self._index(history, text)
        tokens = text.tokens
        for order in self.orders:
            if order <= len(tokens) and (found := history.index.get(tuple(tokens[-order:]))) is not None:
                source, position = found
                return source[position : position + num_draft_tokens]
        return []

    def remember(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """
        Keeps a finished sample, for later answers.

        A sample with drafts is recognised by its tokens, because engines rename requests.
        """
        history, text = self._take_running(prompt, answer) or self._add_answer(prompt)
        self._extend(history, text, self._tail(prompt), answer)
        history.not_indexed.append(text)

    def start_rollout(self) -> None:
        """Drops samples that never finished, and the oldest text beyond the limits."""
        self._running.clear()
        for history in self._histories.values():
            if history.num_tokens > self.max_tokens_per_prompt:
                self._halve(history)
        while self.num_tokens > self.max_tokens:
            _, forgotten = self._histories.popitem(last=False)
            self.num_tokens -= forgotten.num_tokens

    def _take_running(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[_History, _Text] | None:
        history, written = self._histories.get(tuple(prompt)), self._tail(prompt) + list(answer)
        for request_id, (candidate, text) in self._running.items():
            if candidate is history and written[: len(text.tokens)] == text.tokens:
                return self._running.pop(request_id)
        return None

    def _tail(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt[-self.orders[0] :])

    def _add_answer(self, prompt: Sequence[int]) -> tuple[_History, _Text]:
        key = tuple(prompt)
        if key not in self._histories:
            history = self._histories[key] = _History()
            self._add_text(history, list(prompt), indexed=1)
        self._histories.move_to_end(key)
        history, tail = self._histories[key], self._tail(prompt)
        return history, self._add_text(history, tail, indexed=len(tail))

    def _add_text(self, history: _History, tokens: list[int], indexed: int) -> _Text:
        text = _Text(tokens, indexed)
        history.texts.append(text)
        history.not_indexed.append(text)
        self._count(history, len(tokens))
        return text

    def _extend(self, history: _History, text: _Text, tail: list[int], answer: Sequence[int]) -> None:
        new = answer[len(text.tokens) - len(tail) :]
        text.tokens += new
        self._count(history, len(new))

    def _index(self, history: _History, text: _Text) -> None:
        tokens, index = text.tokens, history.index
        for position in range(text.indexed, len(tokens)):
            for order in self.orders:
                if order <= position:
                    index[tuple(tokens[position - order : position])] = (tokens, position)
        text.indexed = max(text.indexed, len(tokens))

    def _halve(self, history: _History) -> None:
        prompt, *answers = history.texts
        kept = answers[(len(answers) + 1) // 2 :]
        removed = sum(len(text.tokens) for text in answers) - sum(len(text.tokens) for text in kept)
        history.texts, history.index = [prompt, *kept], {}
        for text in history.texts:
            text.indexed = 1
        history.not_indexed = list(history.texts)
        self._count(history, -removed)

    def _count(self, history: _History, num_tokens: int) -> None:
        history.num_tokens += num_tokens
        self.num_tokens += num_tokens
