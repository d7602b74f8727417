import pytest
import torch
from tests.lossless.lossless_tools import EngineUnderTest, save_predictable_policy, trained_drafter


@pytest.fixture(scope="session")
def predictable_policy(make_tiny_policy, tmp_path_factory):
    """Policy and its folder."""
    directory = str(tmp_path_factory.mktemp("predictable"))
    return save_predictable_policy(make_tiny_policy, directory), directory


@pytest.fixture(scope="module")
def under_test(predictable_policy, tmp_path_factory):
    """Engine with a drafter over the whole vocabulary."""
    policy, directory = predictable_policy
    return EngineUnderTest(policy, directory, trained_drafter(policy), str(tmp_path_factory.mktemp("drafter")))


@pytest.fixture(scope="module")
def under_test_reduced(predictable_policy, tmp_path_factory):
    """Engine whose drafter knows half of the vocabulary, with gaps."""
    policy, directory = predictable_policy
    drafter = trained_drafter(policy, draft_token_ids=torch.arange(1, 32, 2))
    return EngineUnderTest(policy, directory, drafter, str(tmp_path_factory.mktemp("reduced")))
