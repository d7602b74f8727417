import subprocess
import sys

import pytest

from tlt_trl.strategy import FixedSelector, Strategy, bucket_edges, bucket_index, make_selector


K1, K3 = Strategy("eagle3", 1), Strategy("eagle3", 3)


def test_strategy_text_round_trip():
    for strategy in (Strategy.off(), K3, Strategy("ngram", 12), Strategy("eagle3", 2, "probabilistic")):
        assert Strategy.parse(str(strategy)) == strategy
    assert str(K3) == "eagle3 x3"
    assert str(Strategy.off()) == "off"
    assert Strategy.off().is_off and not K3.is_off


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("medusa", 3), "method='medusa'"),
        (("off", 1), "num_draft_tokens=1"),
        (("eagle3", 0), "num_draft_tokens=0"),
        (("eagle3", -1), "num_draft_tokens=-1"),
        (("eagle3", 2.0), "num_draft_tokens=2.0"),
        (("eagle3", 2, "beam"), "draft_sampling='beam'"),
    ],
)
def test_invalid_strategy(arguments, message):
    with pytest.raises(ValueError, match=message):
        Strategy(*arguments)


@pytest.mark.parametrize("text", ["", "eagle3", "eagle3 3", "eagle3 xthree", "off x1", "eagle3 x3 greedy extra"])
def test_unreadable_strategy(text):
    with pytest.raises(ValueError):
        Strategy.parse(text)


def test_buckets():
    assert bucket_edges(1) == [1]
    assert bucket_edges(8) == [1, 2, 4, 8]
    assert bucket_edges(12) == [1, 2, 4, 8, 12]
    assert [bucket_index([1, 2, 4, 8], b) for b in range(1, 9)] == [0, 1, 2, 2, 3, 3, 3, 3]
    for batch_size in (0, 9):
        with pytest.raises(ValueError, match="batch_size"):
            bucket_index([1, 2, 4, 8], batch_size)
    with pytest.raises(ValueError, match="max_batch_size=0"):
        bucket_edges(0)


def test_fixed_selector_threshold():
    selector = FixedSelector(K3, activation_threshold=4)
    assert [str(selector.select(b)) for b in (5, 4, 1, 32)] == ["off", "eagle3 x3", "eagle3 x3", "off"]
    always = FixedSelector(K3)
    assert all(always.select(b) == K3 for b in (1, 64, 1024))


def test_summary_holds_the_measured_totals():
    selector = FixedSelector(K3, max_batch_size=4)
    selector.update(K3, 3, 9, 0.5)
    selector.update(K3, 4, 5, 0.5, 100, [1, 0, 0])
    rows = selector.summary()
    assert len(rows) == 3 * 2
    row = next(r for r in rows if r["visits"])
    assert (row["bucket_low"], row["bucket_high"], row["strategy"]) == (3, 4, "eagle3 x3")
    assert (row["visits"], row["emitted_tokens"], row["seconds"]) == (2, 14, 1.0)
    assert (row["tokens_per_s"], row["tokens_per_request"]) == (14.0, 2.0)
    assert row["predicted_tokens_per_s"] is None


@pytest.mark.parametrize("name", ["beg_mab", "cost_model", "auto"])
def test_off_is_always_a_choice(name):
    selector = make_selector(name, [K3], 8, seed=0)
    assert selector.strategies == [Strategy.off(), K3]


@pytest.mark.parametrize(
    ("name", "strategies", "options", "message"),
    [
        ("auto", [], {}, r"strategies=\[\]"),
        ("auto", [K3, K1, K3], {}, "repeats"),
        ("ucb", [K3], {}, "selector='ucb'"),
        ("fixed", [K1, K3], {}, "exactly one"),
        ("fixed", [Strategy.off()], {}, "exactly one"),
        ("fixed", [K3], {"activation_threshold": -1}, "activation_threshold=-1"),
        ("auto", [K3], {"bucket_edges": [1, 4, 4]}, "bucket_edges"),
        ("auto", [K3], {"bucket_edges": [0, 4]}, "bucket_edges"),
        ("auto", [K3], {"min_dwell_steps": 0}, "min_dwell_steps=0"),
        ("auto", [K3], {"exploration_budget": 2.0}, "exploration_budget=2.0"),
        ("beg_mab", [K3], {"epsilon": 1.5}, "epsilon=1.5"),
        ("beg_mab", [K3], {"min_samples": 100}, "min_samples=100"),
    ],
)
def test_invalid_selector(name, strategies, options, message):
    with pytest.raises(ValueError, match=message):
        make_selector(name, strategies, 8, 0, **options)


@pytest.mark.parametrize("name", ["fixed", "beg_mab", "cost_model", "auto"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((K3, 4, 8, 0.0), "seconds=0.0"),
        ((K3, 4, 8, -1.0), "seconds=-1.0"),
        ((K3, 4, 8, float("nan")), "seconds=nan"),
        ((K3, 4, 8, float("inf")), "seconds=inf"),
        ((K3, 4, 17, 0.1), "emitted_tokens=17"),
        ((K3, 4, -1, 0.1), "emitted_tokens=-1"),
        ((K3, 9, 9, 0.1), "batch_size=9"),
        ((K3, 4, 8, 0.1, 0, [2, 2]), "accepted_by_position"),
        ((K1, 4, 8, 0.1), "eagle3 x1 is not among"),
    ],
)
def test_invalid_update_changes_nothing(name, arguments, message):
    selector = make_selector(name, [K3], 8, 0)
    before = selector.state_dict()
    with pytest.raises(ValueError, match=message):
        selector.update(*arguments)
    assert selector.state_dict() == before
    for batch_size in (0, 9):
        with pytest.raises(ValueError, match="batch_size"):
            selector.select(batch_size)


def test_importing_the_room_imports_neither_torch_nor_vllm():
    code = "import sys, tlt_trl.tools.simulator; print([m for m in ('torch', 'vllm', 'trl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
