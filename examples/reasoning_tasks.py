"""
Chains of additions from `reasoning-gym`, with a long tail of lengths and credit for every step.

The number of terms is geometric: most answers take a few lines, a few take twenty. That is the shape that makes the
last answers of a rollout run alone. A right answer looks like this:

    4 - 9 = -5
    -5 + 8 = 3
    Answer: 3
"""

import random
import re
from dataclasses import dataclass

from datasets import Dataset
from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset


# A system prompt of our own replaces the default one of SmolLM2's chat template, which is longer and says nothing.
SYSTEM_PROMPT = "Write one step a line, then 'Answer: N'."
_STEP = re.compile(r"(-?\d+) ([+-]) (\d+) = (-?\d+)")
_ANSWER = re.compile(r"Answer: (-?\d+)")


@dataclass(frozen=True)
class TaskConfig:
    """
    What the chains look like.

    Args:
        num_digits (`int`, *optional*, defaults to `1`):
            Digits of every term.
        min_terms (`int`, *optional*, defaults to `2`):
            Terms of the shortest chain.
        max_terms (`int`, *optional*, defaults to `22`):
            Terms of the longest chain. 22 one-digit terms are answered in at most 240 tokens of SmolLM2.
        more_terms_probability (`float`, *optional*, defaults to `0.8`):
            Chance of one more term after each: the chain has `min_terms + p / (1 - p)` terms on average, before the
            cut at `max_terms`.
    """

    num_digits: int = 1
    min_terms: int = 2
    max_terms: int = 22
    more_terms_probability: float = 0.8

    def __post_init__(self):
        if self.num_digits < 1:
            raise ValueError(f"num_digits must be at least 1, not {self.num_digits}.")
        if not 2 <= self.min_terms <= self.max_terms:
            raise ValueError(f"2 <= min_terms <= max_terms is needed, not {self.min_terms} and {self.max_terms}.")
        if not 0 <= self.more_terms_probability < 1:
            raise ValueError(f"more_terms_probability must be in [0, 1), not {self.more_terms_probability}.")


def make_dataset(
    split: str = "train", num_examples: int = 2000, seed: int = 0, config: TaskConfig | None = None
) -> Dataset:
    """
    Dataset for [`~trl.GRPOTrainer`] and for supervised training.

    Args:
        split (`str`, *optional*, defaults to `"train"`):
            Any name; every split is drawn from a random stream of its own. The shortest chains are so few that they
            occur in all of them.
        num_examples (`int`, *optional*, defaults to `2000`):
            Number of rows.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the rows.
        config ([`TaskConfig`], *optional*):
            What the chains look like.

    Returns:
        [`~datasets.Dataset`] with columns `prompt` (messages), `expression` (`"4 - 9 + 8"`) and `solution` (text of
        the right answer).
    """
    config = config or TaskConfig()
    rng = random.Random(f"{split}-{seed}")
    rows = []
    for _ in range(num_examples):
        num_terms = config.min_terms
        while num_terms < config.max_terms and rng.random() < config.more_terms_probability:
            num_terms += 1
        chain = ChainSumConfig(
            min_terms=num_terms,
            max_terms=num_terms,
            min_digits=config.num_digits,
            max_digits=config.num_digits,
            seed=rng.getrandbits(31),
            size=1,
        )
        entry = ChainSumDataset(chain)[0]
        expression = entry["metadata"]["expression"]
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": entry["question"]}]
        rows.append({"prompt": messages, "expression": expression, "solution": solve(expression)})
    return Dataset.from_list(rows)


def parse_chain(expression: str) -> tuple[int, list[tuple[str, int]]]:
    """First term, then operator and term of every step: `"4 - 9 + 8"` is `(4, [("-", 9), ("+", 8)])`."""
    first, *rest = expression.split()
    return int(first), [(operator, int(term)) for operator, term in zip(rest[::2], rest[1::2], strict=True)]


def apply(total: int, operator: str, term: int) -> int:
    return total + term if operator == "+" else total - term


def solve(expression: str) -> str:
    """The right answer, a line a step."""
    total, steps = parse_chain(expression)
    lines = []
    for operator, term in steps:
        result = apply(total, operator, term)
        lines.append(f"{total} {operator} {term} = {result}")
        total = result
    return "\n".join([*lines, f"Answer: {total}"])


def grade(answer: str, expression: str) -> tuple[float, bool]:
    """
    Share of right steps and whether the final answer is right.

    A step is right when it starts from the result of the line above, takes the term that is due and adds up: an error
    costs its own line only, and the lines after it can still earn their share.

    Args:
        answer (`str`):
            Text of the policy.
        expression (`str`):
            Chain to add up.

    Returns:
        `tuple[float, bool]`: share in [0, 1] and correctness.
    """
    total, steps = parse_chain(expression)
    true_total = total
    for operator, term in steps:
        true_total = apply(true_total, operator, term)
    *lines, last = answer.strip().split("\n")
    right_steps = 0
    for line, (operator, term) in zip(lines, steps, strict=False):
        match = _STEP.fullmatch(line)
        if match is None:
            break
        result = int(match[4])
        right_steps += match.groups() == (str(total), operator, str(term), str(apply(total, operator, term)))
        total = result
    match = _ANSWER.fullmatch(last)
    # More lines than terms must not pay, nor must fewer.
    return right_steps / max(len(steps), len(lines)), match is not None and int(match[1]) == true_total


def step_reward(completions, expression: list[str], log_metric=None, **kwargs) -> list[float]:
    """
    Reward function for [`~trl.GRPOTrainer`]: half for the share of right steps, half for the right final answer.

    Args:
        completions (`list[list[dict[str, str]]]` or `list[str]`):
            Answers, as messages or as plain text.
        expression (`list[str]`):
            Column of the dataset.
        log_metric (`Callable[[str, float], None]`, *optional*):
            Given by the trainer; logs the share of right final answers.

    Returns:
        `list[float]`: rewards in [0, 1].
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    grades = [grade(text, chain) for text, chain in zip(texts, expression, strict=True)]
    if log_metric is not None:
        log_metric("accuracy", sum(correct for _, correct in grades) / len(grades))
    return [0.5 * share + 0.5 * correct for share, correct in grades]
