"""The engine of the lossless tests."""

from tests.lossless.conftest import predictable_policy, under_test  # noqa: F401
