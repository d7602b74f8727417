"""
Acceptance of a saved drafter in a plain `vllm.LLM`, to compare with the figure of `tlt-trl bench rollout`.

Usage: python benchmarks/served_acceptance.py POLICY DRAFTER PROMPTS.jsonl [--draft_tokens 3] [--num_prompts 32]

The same prompts, sampled once each, at temperature 1. Prints a line of JSON.
"""

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from tlt_trl.tools.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("policy")
    parser.add_argument("drafter")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--draft_tokens", type=int, default=3)
    parser.add_argument("--num_prompts", type=int, default=32)
    parser.add_argument("--max_completion_length", type=int, default=256)
    parser.add_argument("--max_num_seqs", type=int, default=8)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts, AutoTokenizer.from_pretrained(args.policy))
    prompts = [prompts[i % len(prompts)] for i in range(args.num_prompts)]
    llm = LLM(
        args.policy,
        speculative_config={"method": "eagle3", "model": args.drafter, "num_speculative_tokens": args.draft_tokens},
        max_num_seqs=args.max_num_seqs,
        max_model_len=max(map(len, prompts)) + args.max_completion_length,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=1.0, max_tokens=args.max_completion_length, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics["vllm:spec_decode_num_drafts"].value
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    print(
        json.dumps(
            {
                "acceptance_length": round(1.0 + sum(accepted) / drafts, 3),
                "accepted_by_position": [round(count / drafts, 3) for count in accepted],
                "drafts": drafts,
            }
        )
    )


if __name__ == "__main__":
    main()
