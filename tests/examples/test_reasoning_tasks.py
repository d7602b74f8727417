"""Rows, right answers and rewards of the demo's task."""

import pytest

from reasoning_tasks import TaskConfig, grade, make_dataset, parse_chain, solve, step_reward


EXPRESSION = "4 - 9 + 8"
RIGHT = "4 - 9 = -5\n-5 + 8 = 3\nAnswer: 3"


def num_terms(expression: str) -> int:
    return len(parse_chain(expression)[1]) + 1


class TestDataset:
    def test_the_same_arguments_give_the_same_rows(self):
        assert make_dataset(num_examples=50).to_list() == make_dataset(num_examples=50).to_list()

    @pytest.mark.parametrize("other", [{"seed": 1}, {"split": "eval"}, {"config": TaskConfig(num_digits=2)}])
    def test_seed_split_and_task_change_the_rows(self, other):
        assert make_dataset(num_examples=50)["expression"] != make_dataset(num_examples=50, **other)["expression"]

    def test_more_rows_begin_with_the_same_rows(self):
        assert make_dataset(num_examples=50)["expression"][:20] == make_dataset(num_examples=20)["expression"][:]

    def test_long_chains_of_the_splits_do_not_overlap(self):
        train, evaluation = (
            {expression for expression in make_dataset(split, 500)["expression"] if num_terms(expression) > 5}
            for split in ("train", "eval")
        )
        assert train and evaluation and not train & evaluation

    def test_lengths_have_a_long_tail(self):
        lengths = sorted(num_terms(expression) for expression in make_dataset(num_examples=2000)["expression"])
        assert lengths[0] == 2
        assert lengths[len(lengths) // 2] <= 6
        assert lengths[-1] >= 3 * lengths[len(lengths) // 2]
        assert 0.005 < sum(length >= 16 for length in lengths) / len(lengths) < 0.2

    def test_task_config_bounds_the_terms(self):
        rows = make_dataset(num_examples=200, config=TaskConfig(num_digits=2, min_terms=3, max_terms=4))
        assert {num_terms(expression) for expression in rows["expression"]} == {3, 4}
        terms = [term for expression in rows["expression"] for _, term in parse_chain(expression)[1]]
        assert min(terms) >= 10 and max(terms) <= 99

    def test_columns_and_prompt(self):
        row = make_dataset(num_examples=1)[0]
        assert set(row) == {"prompt", "expression", "solution"}
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert row["expression"] in row["prompt"][-1]["content"]
        assert row["solution"] == solve(row["expression"])

    @pytest.mark.parametrize(
        ("arguments", "field"),
        [
            ({"num_digits": 0}, "num_digits"),
            ({"min_terms": 1}, "min_terms"),
            ({"min_terms": 5, "max_terms": 4}, "max_terms"),
            ({"more_terms_probability": 1.0}, "more_terms_probability"),
        ],
    )
    def test_bad_tasks_are_refused_by_name(self, arguments, field):
        with pytest.raises(ValueError, match=field):
            TaskConfig(**arguments)


class TestReward:
    def test_right_answer(self):
        assert solve(EXPRESSION) == RIGHT
        assert grade(RIGHT, EXPRESSION) == (1.0, True)

    def test_solutions_of_the_dataset_are_right(self):
        rows = make_dataset(num_examples=200)
        assert step_reward(rows["solution"], rows["expression"]) == [1.0] * 200

    @pytest.mark.parametrize(
        ("answer", "reward"),
        [
            ("4 - 9 = -5\n-5 + 8 = 3\nAnswer: 4", 0.5),  # right steps, wrong answer
            ("4 - 9 = -4\n-4 + 8 = 4\nAnswer: 4", 0.25),  # an error costs its own line
            ("4 - 9 = -4\n-5 + 8 = 3\nAnswer: 3", 0.5),  # does not start from the line above
            ("4 - 9 = -5\n-5 + 7 = 2\nAnswer: 2", 0.25),  # not the term that is due
            ("4 - 9 = -5\nAnswer: 3", 0.75),  # a step left out
            ("4 - 9 = -5\n-5 + 8 = 3\n3 + 8 = 11\nAnswer: 3", 0.5 * 2 / 3 + 0.5),  # a step too many
            ("4 - 9 = -5\nso\n-5 + 8 = 3\nAnswer: 3", 0.5 / 3 + 0.5),  # nothing counts after a line that is no step
            ("Answer: 3", 0.5),
            (RIGHT + " apples", 0.5),
            ("4 - 9 = -5\n-5 + 8", 0.25),  # cut off
            ("", 0.0),
            ("no idea", 0.0),
        ],
    )
    def test_exact_values(self, answer, reward):
        assert step_reward([answer], [EXPRESSION]) == [pytest.approx(reward)]

    def test_messages_and_text_earn_the_same(self):
        messages = [[{"role": "assistant", "content": RIGHT}]]
        assert step_reward(messages, [EXPRESSION], prompts=[[]]) == step_reward([RIGHT], [EXPRESSION]) == [1.0]

    def test_accuracy_is_logged(self):
        logged = {}
        step_reward([RIGHT, "no"], [EXPRESSION] * 2, log_metric=logged.__setitem__)
        assert logged == {"accuracy": 0.5}
