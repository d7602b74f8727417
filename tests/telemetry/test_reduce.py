from types import SimpleNamespace

import torch

from tlt_trl.telemetry.reduce import sum_over_ranks


def on_all_ranks(*arguments):
    """What `sum_over_ranks` returns on every rank, run one after the other, and how often each has gathered."""
    rows = []
    for own in arguments:
        sum_over_ranks(SimpleNamespace(device="cpu", gather=lambda row: rows.append(row) or row), *own)
    assert len(rows) == len(arguments)  # one collective
    together = SimpleNamespace(device="cpu", gather=lambda row: torch.cat(rows))
    return [sum_over_ranks(together, *own) for own in arguments]


def test_sums_are_added_and_of_maxima_the_largest_counts():
    first = ({"steps": 3, "time_s": 0.5}, {"latency_s": 0.25})
    second = ({"steps": 4, "time_s": 1.0}, {"latency_s": 0.125})
    expected = {"steps": 7.0, "time_s": 1.5, "latency_s": 0.25}
    assert on_all_ranks(first, second) == [expected, expected]


def test_names_keep_their_order():
    (total,) = on_all_ranks(({"b": 1.0, "a": 2.0}, {"d": 3.0, "c": 4.0}))
    assert list(total) == ["b", "a", "d", "c"]


def test_either_part_may_be_empty():
    assert on_all_ranks(({"a": 1.0},), ({"a": 2.0},)) == [{"a": 3.0}] * 2
    assert on_all_ranks(({}, {"a": -1.0}), ({}, {"a": -2.0})) == [{"a": -1.0}] * 2
