"""The tiny policies and samples of the drafter's tests."""

from tests.drafter.conftest import fill_buffer, make_drafter, make_policy, make_sample, policy  # noqa: F401
