"""
Milliseconds that verification takes on CPU, with vLLM's rejection sampler and with ours, by turns on the same logits.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/cpu_verification.py [--batch_size 8] [--draft_tokens 5] [--json]

Both are given the most probable token of every row as draft token, and logits in bfloat16 as an engine has them.
"""

import argparse
import json
import statistics
import time

import torch
from vllm.platforms import current_platform
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from tlt_trl.vllm_internals import cpu
from tlt_trl.vllm_internals.cpu_verification import verify_in_one_pass
from tlt_trl.vllm_internals.probes import draft_metadata, sampling_metadata


def make_samplers() -> dict[str, RejectionSampler]:
    """vLLM's rejection sampler with only the repairs that it needs, and ours."""
    cpu.register()
    current_platform.register_triton_kernel_overrides()
    samplers = {name: RejectionSampler(Sampler(logprobs_mode="processed_logprobs")) for name in ("vllm", "one_pass")}
    verify_in_one_pass(samplers["one_pass"])
    return samplers


def measure(batch_size: int, draft_tokens: int, vocab_size: int, rounds: int, seed: int) -> dict[str, float]:
    """Median milliseconds of each, and their ratio."""
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(batch_size, draft_tokens + 1, vocab_size, generator=generator)).bfloat16()
    drafts = logits[:, :draft_tokens].argmax(-1)
    samplers = make_samplers()
    times_ms: dict[str, list[float]] = {name: [] for name in samplers}
    for number in range(rounds + 3):
        for name, sampler in samplers.items():
            arguments = (
                draft_metadata(drafts, draft_tokens + 1),
                None,
                logits.view(-1, vocab_size).clone(),  # may be changed in place
                sampling_metadata(torch.ones(batch_size), 1.0, 0),
            )
            started = time.perf_counter()
            sampler(*arguments)
            if number >= 3:  # the first rounds compile
                times_ms[name].append(1000 * (time.perf_counter() - started))
    medians = {f"{name}_ms": statistics.median(times) for name, times in times_ms.items()}
    return medians | {"ratio": medians["vllm_ms"] / medians["one_pass_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--draft_tokens", type=int, default=5)
    parser.add_argument("--vocab_size", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    result = measure(args.batch_size, args.draft_tokens, args.vocab_size, args.rounds, args.seed)
    if args.json:
        print(json.dumps(vars(args) | result))
        return
    print(f"vLLM {result['vllm_ms']:.2f} ms, one pass {result['one_pass_ms']:.2f} ms: {result['ratio']:.2f}x")


if __name__ == "__main__":
    main()
