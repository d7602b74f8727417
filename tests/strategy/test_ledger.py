import pytest

from tlt_trl.strategy import StepLedger, Strategy, describe, ledger_metrics, make_selector


OFF, TWO, LOOKUP = Strategy.off(), Strategy("eagle3", 2), Strategy("ngram", 4)


class KnownRates:
    """A selector that expects 100, 200 and 150 tokens/s of one request, in proportion for more."""

    strategies = [OFF, TWO, LOOKUP]

    def expected_tokens_per_s(self, batch_size, context_tokens):
        return [100.0 * batch_size, 200.0 * batch_size, None if context_tokens > 1000 else 150.0 * batch_size]


def ledger_of(*steps):
    ledger = StepLedger(KnownRates())
    for strategy, batch_size, tokens, seconds, context_tokens, steady in steps:
        ledger.add(strategy, batch_size, tokens, seconds, context_tokens, steady)
    return ledger


def test_steady_steps_are_priced():
    ledger = ledger_of((TWO, 1, 20, 0.125, 0, True), (TWO, 1, 20, 0.125, 0, True), (LOOKUP, 2, 30, 0.2, 10, True))
    # 40 tokens at 200/s and 30 at 300/s predicted; 40 at 100/s and 30 at 200/s without; best is 200 per request.
    assert ledger.sums() == pytest.approx(
        {"off": 0, "eagle3 x2": 2, "ngram x4": 1}
        | {"measured_s": 0.45, "predicted_s": 0.2 + 0.1, "off_s": 0.4 + 0.15, "best_s": 0.2 + 30 / 400}
        | {"saved_s": 0.15 - 0.05}
    )
    assert ledger_metrics(KnownRates.strategies, ledger.sums()) == pytest.approx(
        {
            "tlt/strategy/eagle3_x2": 2 / 3,
            "tlt/strategy/ngram_x4": 1 / 3,
            "tlt/speculation/predicted_speedup": 0.55 / 0.3,
            "tlt/speculation/measured_speedup": 0.55 / 0.45,
            "tlt/speculation/regret": 1 - 0.275 / 0.3,
        }
    )


def test_other_steps_only_count():
    ledger = ledger_of((OFF, 1, 1, 0.01, 0, False), (LOOKUP, 1, 5, 0.1, 2000, True))
    assert ledger.steps_by_strategy() == {"off": 1, "ngram x4": 1}
    # Of the lookup with that much context nothing is known.
    assert list(ledger.sums().values()) == [1, 0, 1, 0, 0, 0, 0, 0]
    shares = {"tlt/strategy/off": 0.5, "tlt/strategy/ngram_x4": 0.5}
    assert ledger_metrics(KnownRates.strategies, ledger.sums()) == shares


def test_steps_with_drafts_save_and_others_do_not():
    # 20 tokens take 0.2 s without drafts, whatever the prediction for steps without drafts is worth.
    steps = [(TWO, 1, 20, 0.125, 0, True), (OFF, 1, 1, 0.5, 0, True)]
    assert ledger_of(*steps).sums()["saved_s"] == pytest.approx(0.075)
    # A step that could not be priced counts as the others of its strategy.
    assert ledger_of(*steps, (TWO, 1, 20, 0.5, 0, False)).sums()["saved_s"] == pytest.approx(0.15)


def test_neighbouring_buckets_with_the_same_choice_are_one_range():
    ledger = ledger_of(
        (TWO, 1, 2, 0.01, 0, True),
        (TWO, 2, 2, 0.01, 0, True),
        (TWO, 4, 2, 0.01, 0, True),
        (TWO, 3, 2, 0.01, 0, True),
        (OFF, 3, 2, 0.01, 0, True),
        (OFF, 8, 2, 0.01, 0, True),
        (LOOKUP, 6, 2, 0.01, 0, False),
    )
    assert ledger.choices() == [(1, 4, TWO), (5, 8, OFF)]


def test_the_line():
    metrics = {"tlt/speculation/predicted_speedup": 1.62, "tlt/speculation/measured_speedup": 1.549}
    choices = [(1, 1, LOOKUP), (2, 4, Strategy("eagle3", 1, "probabilistic")), (5, 16, OFF)]
    assert describe(metrics, choices) == (
        "speculation: paying 1.62x (measured 1.55x), 4 n-gram tokens at batch 1, 1 sampled draft token at batch 2-4, "
        "off at batch 5-16"
    )
    assert describe({}, []) == "speculation: no steady step"


@pytest.mark.parametrize("name", ["fixed", "beg_mab", "cost_model", "auto"])
def test_every_selector_says_what_it_expects(name):
    selector = make_selector(name, [TWO], max_batch_size=8)
    for _ in range(8):
        for strategy in selector.strategies:
            tokens = 4 * (1 + strategy.num_draft_tokens)
            selector.update(strategy, 4, tokens, 0.01 + 0.002 * strategy.num_draft_tokens, context_tokens=100)
    off, two = selector.expected_tokens_per_s(4, 100)
    if name == "fixed":
        assert off is two is None
    else:
        assert off == pytest.approx(400, rel=0.3) and two == pytest.approx(12 / 0.014, rel=0.3)
