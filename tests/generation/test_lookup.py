import random

import pytest

from tlt_trl.generation.lookup import LookupDrafter


PROMPT = [1, 2, 3]


def test_goes_on_as_its_own_text_did():
    drafter = LookupDrafter(orders=(2,))
    assert drafter.propose("a", PROMPT, [7, 8, 9, 5, 7, 8], 3) == [9, 5, 7]
    assert drafter.propose("a", PROMPT, [7, 8, 9, 5, 7, 8, 4], 3) == []


def test_goes_on_as_the_prompt_did():
    assert LookupDrafter(orders=(2,)).propose("a", [5, 6, 7, 8, 9], [6, 7], 2) == [8, 9]
    # The n-gram may lie across the end of the prompt.
    assert LookupDrafter(orders=(2,)).propose("a", [5, 6, 7, 5], [6], 1) == [7]


def test_goes_on_as_another_answer_of_the_group_did():
    drafter = LookupDrafter(orders=(3, 2))
    drafter.propose("a", PROMPT, [10, 11, 12, 13, 14], 2)
    assert drafter.propose("b", PROMPT, [20, 10, 11, 12], 5) == [13, 14]
    # Another prompt's answers are none of its business.
    assert drafter.propose("c", [1, 2, 4], [20, 10, 11, 12], 5) == []


def test_goes_on_as_an_answer_of_an_earlier_epoch_did():
    drafter = LookupDrafter(orders=(2,))
    drafter.remember(PROMPT, [10, 11, 12, 13])
    drafter.start_rollout()
    assert drafter.propose("a", PROMPT, [10, 11], 9) == [12, 13]


def test_longest_match_decides_then_the_most_recent():
    drafter = LookupDrafter(orders=(2, 1))
    answer = [4, 5, 6, 9, 5, 7, 4, 5]
    assert drafter.propose("a", PROMPT, answer, 1) == [6]  # after (4, 5), although 5 alone went on with 7 later
    drafter.propose("b", PROMPT, [4, 5, 8], 1)
    assert drafter.propose("a", PROMPT, answer, 1) == [8]


def test_first_answer_without_a_match_drafts_nothing():
    assert LookupDrafter().propose("a", PROMPT, [], 3) == []
    assert LookupDrafter().propose("a", [1], [], 3) == []
    assert LookupDrafter().propose("a", [], [4], 3) == []


def longest_recent_match(orders, written, tokens, num_draft_tokens):
    """Reference twin: scan everything written, newest first. `written` holds (text, position) in order of writing."""
    for order in orders:
        for text, position in reversed(written):
            if order <= min(position, len(tokens)) and text[position - order : position] == tokens[-order:]:
                return text[position : position + num_draft_tokens]
    return []


@pytest.mark.parametrize("seed", range(5))
def test_index_finds_what_a_scan_finds(seed):
    rng = random.Random(seed)
    orders = (3, 2, 1)
    drafter = LookupDrafter(orders)
    prompt = [rng.randrange(4) for _ in range(6)]
    written = [(prompt, position) for position in range(1, len(prompt))]
    answers, texts = {"a": [], "b": []}, {"a": list(prompt[-3:]), "b": list(prompt[-3:])}
    for _ in range(200):
        name = rng.choice("ab")
        for token in [rng.randrange(4) for _ in range(rng.randint(1, 3))]:
            answers[name].append(token)
            texts[name].append(token)
            written.append((texts[name], len(texts[name]) - 1))
        expected = longest_recent_match(orders, written, texts[name], 3)
        assert drafter.propose(name, prompt, answers[name], 3) == expected


def test_prompts_used_longest_ago_are_forgotten():
    drafter = LookupDrafter(orders=(2,), max_tokens=30)
    for prompt in range(10):
        drafter.remember([prompt, prompt], [10, 11, 12, 13])
        drafter.start_rollout()
        assert drafter.num_tokens <= 30
    assert drafter.propose("a", [9, 9], [10, 11], 2) == [12, 13]
    assert drafter.propose("b", [0, 0], [10, 11], 2) == []


def test_old_answers_of_every_prompt_are_forgotten():
    drafter = LookupDrafter(orders=(2,), max_tokens_per_prompt=40)
    other = [1, 2, 4]
    for answer in range(100, 200, 4):
        for prompt in (PROMPT, other):
            drafter.remember(prompt, [answer, answer + 1, answer + 2, answer + 3])
        drafter.start_rollout()
        assert drafter.num_tokens <= 2 * 40
    for prompt in (PROMPT, other):
        assert drafter.propose("a" + str(prompt), prompt, [196, 197], 2) == [198, 199]
        assert drafter.propose("b" + str(prompt), prompt, [100, 101], 2) == []
    assert drafter.propose("c", PROMPT, [1, 2], 1) == [3]  # the prompt itself stays


def test_a_sample_that_was_proposed_for_is_kept_once():
    drafter = LookupDrafter(orders=(2,))
    drafter.propose("0-renamed", PROMPT, [5, 6, 7], 2)
    drafter.propose("1-renamed", PROMPT, [5, 8], 2)
    drafter.remember(PROMPT, [5, 8, 9, 10])
    drafter.remember(PROMPT, [5, 6, 7])
    assert drafter.num_running == 0
    assert drafter.num_tokens == len(PROMPT) + 2 * 2 + 4 + 3
    assert drafter.propose("2", PROMPT, [8, 9], 1) == [10]


def test_samples_that_never_finished_are_let_go():
    drafter = LookupDrafter(orders=(2,), max_tokens=30)
    drafter.propose("a", PROMPT, [5, 6, 7, 8], 2)
    drafter.start_rollout()
    assert drafter.propose("a", PROMPT, [9, 5, 6], 2) == [7, 8]


@pytest.mark.parametrize("orders", [(), (2, 3), (2, 2), (0,)])
def test_orders_must_fall(orders):
    with pytest.raises(ValueError, match="fall strictly"):
        LookupDrafter(orders)
