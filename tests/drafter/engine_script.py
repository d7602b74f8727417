"""
Run by `test_engine.py` in a process of its own: a plain `vllm.LLM` with a saved drafter, every proposal written down.

Usage: engine_script.py POLICY_DIR DRAFTER_DIR NUM_SPECULATIVE_TOKENS OUTPUT_JSON, prompts as JSON on stdin.
"""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer


def main(policy_dir: str, drafter_dir: str, num_tokens: str, output: str) -> None:
    prompts = json.load(sys.stdin)
    proposals = []
    propose = SpecDecodeBaseProposer.propose

    def recorded_propose(self, *args, **kwargs):
        drafts = propose(self, *args, **kwargs)
        proposals.append(drafts.tolist())
        return drafts

    SpecDecodeBaseProposer.propose = recorded_propose
    llm = LLM(
        policy_dir,
        speculative_config={
            "method": "eagle3",
            "model": drafter_dir,
            "num_speculative_tokens": int(num_tokens),
        },
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=1,
        async_scheduling=False,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    results = []
    for prompt in prompts:
        proposals.clear()
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
        (request,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        results.append({"tokens": list(request.outputs[0].token_ids), "proposals": list(proposals)})
    with open(output, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
