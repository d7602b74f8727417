import logging
import re

import pytest
from transformers import HfArgumentParser
from trl import GRPOConfig

from tlt_trl import TLTGRPOConfig
from tlt_trl.strategy import Strategy
from tlt_trl.strategy.menu import strategies_for
from tlt_trl.tlt_grpo_config import OWN_SPECULATIVE_KEYS


OURS = TLTGRPOConfig.__dataclass_fields__.keys() - GRPOConfig.__dataclass_fields__.keys()


def config(tmp_path, **kwargs):
    return TLTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **kwargs)


def test_is_a_grpo_config_with_defaults(tmp_path):
    args = config(tmp_path)
    assert isinstance(args, GRPOConfig)
    assert (args.speculation_selector, args.speculation_strategies, args.drafter_training) == ("auto", None, True)
    assert [str(s) for s in args.strategies] == ["eagle3 x1", "eagle3 x2", "eagle3 x3", "eagle3 x5", "ngram x4"]
    assert (args.max_draft_tokens, args.max_drafter_tokens) == (5, 5)


def test_fixed_selector_sizes_the_engine(tmp_path):
    assert config(tmp_path, speculation_selector="fixed").strategies == [Strategy("eagle3", 3)]
    args = config(tmp_path, speculation_selector="fixed", speculation_strategies=["eagle3 x2"])
    assert args.max_draft_tokens == 2


def test_the_longest_draft_may_be_a_lookup(tmp_path):
    args = config(tmp_path, speculation_strategies=["eagle3 x2", "ngram x8", "eagle3 x3 probabilistic"])
    assert (args.max_draft_tokens, args.max_drafter_tokens) == (8, 3)
    assert args.strategies[2] == Strategy("eagle3", 3, "probabilistic")


@pytest.mark.parametrize(
    ("kwargs", "repeats"),
    [
        ({"speculation_selector": "fixed"}, True),
        ({"speculation_selector": "fixed", "speculation_strategies": ["eagle3 x2"]}, True),
        ({"speculation_selector": "fixed", "speculation_strategies": ["eagle3 x2 probabilistic"]}, False),
        ({"speculation_selector": "fixed", "speculation_activation_threshold": 8}, False),
        ({"speculation_selector": "beg_mab"}, False),
        ({}, False),
    ],
)
def test_seeds_are_repeated_by_equal_greedy_drafts_only(tmp_path, kwargs, repeats):
    assert config(tmp_path, **kwargs).repeats_seeds is repeats


def test_adds_at_most_17_fields_and_each_has_help():
    assert len(OURS) <= 17
    for name in OURS:
        text = TLTGRPOConfig.__dataclass_fields__[name].metadata["help"]
        assert len(text) > 30, name
        assert "%" not in text, f"{name}: argparse reads % as a format"


def test_one_prefix_per_concern():
    prefixes = ("speculation_", "vllm_", "sample_", "drafter_", "feature_", "log_")
    assert [name for name in OURS if not name.startswith(prefixes)] == []


def test_takes_over_a_plain_grpo_config(tmp_path):
    plain = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", learning_rate=3e-5, seed=9)
    args = TLTGRPOConfig.from_grpo_config(plain)
    assert isinstance(args, TLTGRPOConfig)
    for name in GRPOConfig.__dataclass_fields__:
        assert getattr(args, name) == getattr(plain, name), name
    assert args.strategies == config(tmp_path).strategies
    assert TLTGRPOConfig.from_grpo_config(args) is args


def test_engine_arguments_can_come_from_a_command_line(tmp_path):
    assert config(tmp_path, vllm_engine_kwargs='{"max_num_seqs": 8}').vllm_engine_kwargs == {"max_num_seqs": 8}


def test_strategies_can_come_from_a_command_line(tmp_path):
    line = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--report_to", "none"]
    line += ["--speculation_strategies", "eagle3 x1", "eagle3 x3 probabilistic", "ngram x4"]
    (args,) = HfArgumentParser(TLTGRPOConfig).parse_args_into_dataclasses(line)
    assert [str(s) for s in args.strategies] == ["eagle3 x1", "eagle3 x3 probabilistic", "ngram x4"]


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("speculation_selector", "ucb", "'ucb'"),
        ("speculation_on_unsupported", "ignore", "'ignore'"),
        ("sample_reallocation", "kv", "'kv'"),
        ("speculation_strategies", [], "[]"),
        ("speculation_strategies", "eagle3 x3", "'eagle3 x3'"),
        ("speculation_strategies", ["eagle3 x3 beam"], "'beam'"),
        ("speculation_strategies", ["eagle3 x0"], "num_draft_tokens=0"),
        ("speculation_strategies", ["eagle3 x1", "eagle3 three"], "'eagle3 three'"),
        ("speculation_strategies", ["eagle3 x1", "medusa x3"], "'medusa'"),
        ("speculation_strategies", ["eagle3 x1", "ngram x4 probabilistic"], "'ngram'"),
        ("speculation_strategies", ["eagle3 x1", "eagle3 x1"], "'eagle3 x1'"),
        ("speculation_strategies", ["eagle3 x1", "eagle3 x40"], "'eagle3 x40'"),
        ("speculation_strategies", ["eagle3 x1", "off"], "'off'"),
        ("speculation_strategies", ["ngram x4"], "'ngram x4'"),
        ("drafter_time_budget", 1.5, "1.5"),
        ("drafter_time_budget", float("nan"), "nan"),
        ("drafter_vocab_size", 0, "0"),
        ("feature_buffer_tokens", 0, "0"),
    ],
)
def test_bad_values_name_the_field_and_the_value(tmp_path, field, value, shown):
    with pytest.raises(ValueError, match=f"`{field}`") as error:
        config(tmp_path, **{field: value})
    assert shown in str(error.value)


def test_a_negative_threshold_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`speculation_activation_threshold` must be at least 0, got -1"):
        config(tmp_path, speculation_selector="fixed", speculation_activation_threshold=-1)


def test_fixed_takes_one_strategy(tmp_path):
    with pytest.raises(
        ValueError, match="`speculation_strategies` holds 2 strategies.*`speculation_selector='fixed'`"
    ):
        config(tmp_path, speculation_selector="fixed", speculation_strategies=["eagle3 x1", "eagle3 x3"])


def test_learning_rates_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="`drafter_learning_rate` must be greater than 0"):
        config(tmp_path, drafter_learning_rate=0.0)


def test_engine_arguments_that_the_trainer_sets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must not hold `disable_log_stats`"):
        config(tmp_path, vllm_engine_kwargs={"disable_log_stats": True})
    for name, remedy in OWN_SPECULATIVE_KEYS.items():
        with pytest.raises(ValueError, match=f"must not hold `{name}`: {re.escape(remedy)}"):
            config(tmp_path, vllm_engine_kwargs={"speculative_config": {name: "ngram"}})
    config(tmp_path, vllm_engine_kwargs={"speculative_config": {"disable_eagle_block_drop": True}})


@pytest.mark.parametrize(
    ("field", "value", "others", "reason"),
    [
        ("speculation_activation_threshold", 32, {}, "speculation_selector='auto'"),
        (
            "speculation_activation_threshold",
            0,
            {"speculation_selector": "beg_mab"},
            "speculation_selector='beg_mab'",
        ),
        ("drafter_vocab_size", 32, {"drafter_model_name_or_path": "drafter"}, "drafter_model_name_or_path='drafter'"),
        ("drafter_time_budget", 0.2, {"drafter_training": False}, "drafter_training=False"),
        ("drafter_learning_rate", 1e-3, {"drafter_training": False}, "drafter_training=False"),
        ("drafter_background_training", False, {"drafter_training": False}, "drafter_training=False"),
        ("feature_buffer_tokens", 64, {"drafter_training": False}, "drafter_training=False"),
    ],
)
def test_what_would_be_ignored_is_an_error(tmp_path, field, value, others, reason):
    with pytest.raises(ValueError, match=f"`{field}` has no effect with `{reason}`; "):
        config(tmp_path, **others, **{field: value})
    # The default says nothing, so it may stand there.
    default = TLTGRPOConfig.__dataclass_fields__[field].default
    assert getattr(config(tmp_path, **others, **{field: default}), field) == default


class TestStrategiesForAnEngine:
    strategies = [Strategy.parse(text) for text in ("eagle3 x1", "ngram x4", "eagle3 x3")]

    def test_all_where_it_can_look_up(self, caplog):
        assert strategies_for(self.strategies, can_look_up=True) == self.strategies
        assert not caplog.records

    def test_no_lookups_where_it_cannot(self, caplog):
        with caplog.at_level(logging.WARNING):
            kept = strategies_for(self.strategies, can_look_up=False)
        assert [str(s) for s in kept] == ["eagle3 x1", "eagle3 x3"]
        assert "ngram x4" in caplog.text and "async_scheduling" in caplog.text

    def test_silent_where_none_is_asked_for(self, caplog):
        strategies = [Strategy("eagle3", 1)]
        assert strategies_for(strategies, can_look_up=False) == strategies
        assert not caplog.records
