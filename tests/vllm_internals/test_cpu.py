import subprocess
import sys

import pytest
import torch

from tlt_trl.vllm_internals import cpu as cpu_backend


vllm = pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(
    not __import__("vllm.platforms", fromlist=["x"]).current_platform.is_cpu(), reason="repairs of the CPU backend"
)

# Runs before anything is repaired, which needs a process of its own.
UNREPAIRED = """
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
from vllm.utils import cpu_triton_utils
from tlt_trl.vllm_internals import cpu as cpu_backend
print(cpu_backend.expand_works(cpu_triton_utils._expand_kernel_impl))
cpu_backend.register()
print(cpu_backend.expand_works(cpu_triton_utils._expand_kernel_impl))
"""


def run(code, **env):
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line in ("True", "False")]


def reference_expand(values, cu_num_tokens, replace_from, replace_to):
    """Plain twin of `expand_kernel`."""
    expanded, start = [], 0
    for value, end in zip(values.tolist(), cu_num_tokens.tolist(), strict=True):
        expanded += [replace_to if value == replace_from else value] * (end - start)
        start = end
    return expanded


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_expand_kernel_equals_reference(dtype):
    values = torch.tensor([2, 0, 5, 7], dtype=dtype)
    cu_num_tokens = torch.tensor([1, 3, 3, 6], dtype=torch.int32)  # the third request has no draft tokens
    output = torch.empty(6, dtype=dtype)
    cpu_backend.expand_kernel(output, values, cu_num_tokens, 0, 1)
    assert output.tolist() == reference_expand(values, cu_num_tokens, 0, 1) == [2, 1, 1, 7, 7, 7]


def test_expand_works_recognises_a_kernel_that_writes_elsewhere():
    def writes_into_a_copy(output, *args):
        cpu_backend.expand_kernel(output.clone(), *args)

    assert cpu_backend.expand_works(cpu_backend.expand_kernel)
    assert not cpu_backend.expand_works(writes_into_a_copy)


@pytest.mark.processes
def test_installed_engine_needs_the_repair_and_gets_it():
    # When this fails on a newer vLLM because the first line is "True", the repair can go.
    assert run(UNREPAIRED) == ["False", "True"]


@pytest.mark.processes
def test_switch_for_tests_leaves_the_fault_in_place():
    assert run(UNREPAIRED, **{cpu_backend.SKIP_VARIABLE: "1"}) == ["False", "False"]


@pytest.mark.processes
def test_overrides_are_registered_once():
    code = """
from tlt_trl.vllm_internals import cpu as cpu_backend
from vllm.triton_utils import dispatcher
calls = []
original = dispatcher.register_kernels
dispatcher.register_kernels = lambda overrides: (calls.append(1), original(overrides))
cpu_backend.register()
cpu_backend.register()
from vllm.platforms import current_platform
current_platform.register_triton_kernel_overrides()
current_platform.register_triton_kernel_overrides()
print(len(calls) == 1)
"""
    assert run(code) == ["True"]


def recovered(target, drafts, draft_probs, num_samples, generators=None):
    """Samples `num_samples` recovered tokens for every row of `target`; shape (rows, num_samples)."""
    from types import SimpleNamespace

    rows = len(target)
    tokens = cpu_backend.sample_recovered_tokens(
        rows,
        [rows] * num_samples,
        None,
        torch.tensor(drafts, dtype=torch.int32).repeat(num_samples),
        None if draft_probs is None else draft_probs.repeat(num_samples, 1),
        target.repeat(num_samples, 1),
        SimpleNamespace(generators=generators or {}),
        torch.device("cpu"),
    )
    assert tokens.dtype == torch.int32
    return tokens.view(num_samples, rows).T.long()


def reference_residual(target, draft, draft_probs):
    """Plain twin: max(p - q, 0), renormalised."""
    q = torch.nn.functional.one_hot(torch.tensor(draft), len(target)).double() if draft_probs is None else draft_probs
    residual = (target.double() - q.double()).clamp_min(0)
    return residual / residual.sum()


@pytest.mark.parametrize("probabilistic", [False, True])
def test_recovered_tokens_follow_the_residual(probabilistic):
    from tlt_trl.generation.canary import chi_square_p_value

    torch.manual_seed(0)
    target = (2 * torch.randn(4, 12)).softmax(-1)
    target[1, 3:5] = 0.0  # filtered by top-p
    target[1] /= target[1].sum()
    draft_probs = (2 * torch.randn(4, 12)).softmax(-1) if probabilistic else None
    drafts = [0, 5, 11, 7]  # first and last entry included
    tokens = recovered(target, drafts, draft_probs, 20_000)
    for row, draft in enumerate(drafts):
        expected = reference_residual(target[row], draft, None if draft_probs is None else draft_probs[row])
        counts = torch.bincount(tokens[row], minlength=12)
        assert chi_square_p_value(counts, expected) > 1e-6
        assert probabilistic or counts[draft] == 0


def test_recovered_tokens_of_a_seeded_request_repeat():
    target = torch.full((1, 50), 0.02)
    first = recovered(target, [0], None, 3, {1: torch.Generator().manual_seed(7)})
    second = recovered(target, [0], None, 3, {1: torch.Generator().manual_seed(7)})
    assert first[0, 1] == second[0, 1]


@pytest.mark.parametrize("row", [[0.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
def test_tokens_of_probability_zero_are_never_recovered(row):
    target = torch.tensor([row])
    tokens = recovered(target, [3], None, 2000)
    assert (target[0, tokens[0]] > 0).all()
