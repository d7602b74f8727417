import pytest
import torch

from tlt_trl.generation.policy_mark import SAMPLED_NUMBERS, PolicyMark


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 7, bias=False))


def mark(policy):
    return PolicyMark.of(policy)


def optimiser_step(policy):
    policy(torch.ones(40)).sum().backward()
    torch.optim.SGD(policy.parameters(), lr=0.1).step()


@pytest.mark.parametrize(
    "change",
    [
        optimiser_step,
        lambda policy: policy.load_state_dict({name: tensor + 1 for name, tensor in policy.state_dict().items()}),
        lambda policy: policy[0].weight.data.mul_(1.01),  # autograd's counter does not see it
        lambda policy: policy[0].weight.detach()[17, 3].add_(1.0),  # the sample does not see it
        lambda policy: policy[1].bias.data.fill_(float("nan")),
    ],
    ids=["optimiser", "load_state_dict", "data", "one number", "nan"],
)
def test_whatever_changes_the_policy_changes_its_mark(policy, change):
    before = mark(policy)
    assert mark(policy) == before
    change(policy)
    after = mark(policy)
    assert after != before
    assert mark(policy) == after  # also where a number is not one


def test_a_forward_pass_changes_nothing(policy):
    before = mark(policy)
    with torch.no_grad():
        policy(torch.ones(3, 40))
    assert mark(policy) == before


def test_parameters_that_are_elsewhere_are_marked_as_empty():
    elsewhere = torch.nn.Module()
    elsewhere.weight = torch.nn.Parameter(torch.empty(0))
    assert mark(elsewhere).sample == b""


def test_a_mark_is_small(policy):
    # One copy of this goes to the CPU before every rollout.
    assert len(mark(policy).sample) <= 4 * SAMPLED_NUMBERS * len(list(policy.parameters()))
