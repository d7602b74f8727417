import pytest
from trl import GRPOConfig

from tlt_trl import TLTGRPOConfig


def config(tmp_path, **kwargs):
    return TLTGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **kwargs)


def test_is_a_grpo_config_with_defaults(tmp_path):
    args = config(tmp_path)
    assert isinstance(args, GRPOConfig)
    assert (args.speculation_selector, args.draft_token_choices, args.train_drafter) == ("auto", [1, 2, 3, 5], True)
    assert args.max_num_draft_tokens == 5


def test_fixed_selector_sizes_the_engine(tmp_path):
    assert config(tmp_path, speculation_selector="fixed", num_draft_tokens=2).max_num_draft_tokens == 2


def test_every_field_of_ours_has_help():
    ours = TLTGRPOConfig.__dataclass_fields__.keys() - GRPOConfig.__dataclass_fields__.keys()
    assert len(ours) > 15
    for name in ours:
        assert len(TLTGRPOConfig.__dataclass_fields__[name].metadata["help"]) > 30, name


def test_takes_over_a_plain_grpo_config(tmp_path):
    plain = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", learning_rate=3e-5, seed=9)
    args = TLTGRPOConfig.from_grpo_config(plain)
    assert isinstance(args, TLTGRPOConfig)
    for name in GRPOConfig.__dataclass_fields__:
        assert getattr(args, name) == getattr(plain, name), name
    assert args.draft_token_choices == [1, 2, 3, 5]
    assert TLTGRPOConfig.from_grpo_config(args) is args


def test_engine_arguments_can_come_from_a_command_line(tmp_path):
    assert config(tmp_path, vllm_engine_kwargs='{"max_num_seqs": 8}').vllm_engine_kwargs == {"max_num_seqs": 8}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speculation_selector", "ucb"),
        ("draft_sampling", "beam"),
        ("spec_on_inexact", "ignore"),
        ("num_draft_tokens", 0),
        ("draft_token_choices", []),
        ("draft_token_choices", [1, 1]),
        ("draft_token_choices", [1, 40]),
        ("speculation_activation_threshold", -1),
        ("drafter_time_budget", 1.5),
        ("drafter_unroll_steps", 0),
        ("drafter_max_tokens_per_step", 1),
        ("drafter_vocab_size", 0),
        ("feature_buffer_tokens", 0),
        ("feature_long_answer_fraction", 2.0),
    ],
)
def test_bad_values_name_the_field_and_the_value(tmp_path, field, value):
    with pytest.raises(ValueError, match=f"(?s)`{field}`") as error:
        config(tmp_path, **{field: value})
    shown = value[-1] if isinstance(value, list) and value and value[-1] > 16 else value
    assert str(shown) in str(error.value)


@pytest.mark.parametrize("field", ["drafter_learning_rate", "drafter_max_grad_norm"])
def test_rates_must_be_positive(tmp_path, field):
    with pytest.raises(ValueError, match=f"`{field}` must be greater than 0"):
        config(tmp_path, **{field: 0.0})


def test_engine_arguments_that_the_trainer_sets_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must not hold `speculative_config`"):
        config(tmp_path, vllm_engine_kwargs={"speculative_config": {"method": "ngram"}})
