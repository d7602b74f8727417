"""One training run of a policy of some kind, in a process of its own; prints what came of it as JSON."""

import json
import sys

import torch
from tests.conftest import save_tiny_policy
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from vllm import SamplingParams

from tlt_trl import TLTGRPOTrainer


PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25], [40, 11, 33, 7, 60, 61], [12, 13, 12, 13, 12, 13]]
LENGTH = 24
VOCAB_SIZE = 64


def train(folder, model_type, dtype, tied, compiled, **kwargs):
    """Trains for three steps, then samples while speculating and compares whole distributions."""
    directory = save_tiny_policy(
        f"{folder}/policy", VOCAB_SIZE, num_layers=2, tied=tied, model_type=model_type, spread_vectors=0.2
    )
    defaults = {
        "bf16": dtype == "bfloat16",
        "model_init_kwargs": {"dtype": dtype},
        "learning_rate": 1e-2,
        "drafter_time_budget": 0.5,
        "vllm_engine_kwargs": {
            "enforce_eager": not compiled,
            "dtype": dtype,
            "kv_cache_memory_bytes": 2**26,
            "max_logprobs": VOCAB_SIZE,
        },
    }
    if "speculation_selector" not in kwargs:
        defaults["speculation_selector"] = "fixed"
    trainer = TLTGRPOTrainer(
        directory,
        text_reward,
        colocated_arguments(f"{folder}/run", **(defaults | kwargs)),
        prompts(),
        # For some types of policy transformers would load the words into a tokenizer of another kind.
        processing_class=PreTrainedTokenizerFast.from_pretrained(directory),
    )
    trainer.train()
    trainer.vllm_generation.sync_weights()
    loop = trainer.vllm_generation.rollout_loop
    loop.pop_stats()
    params = SamplingParams(max_tokens=LENGTH, temperature=1.0, logprobs=VOCAB_SIZE, ignore_eos=True, detokenize=False)
    outputs = trainer.vllm_generation.llm.generate(
        [{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False
    )
    samples = [output.outputs[0] for output in outputs]
    engine = torch.tensor(
        [[[given[token].logprob for token in range(VOCAB_SIZE)] for given in s.logprobs] for s in samples]
    )
    ids = torch.tensor([prompt + list(s.token_ids) for prompt, s in zip(PROMPTS, samples, strict=True)])
    initial = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    wanted, stale = (distributions(policy, ids) for policy in (trainer.model.eval(), initial.eval()))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    stats = loop.pop_stats()
    return {
        "speculative": trainer.speculative,
        "difference": rms(engine - wanted),
        "stale_difference": rms(engine - stale),
        "spread": rms(wanted - wanted.mean(-1, keepdim=True)),
        "losses": [log["loss"] for log in logs],
        "drafter_steps": trainer.online_drafter.steps,
        # An adaptive selector may find that speculation does not pay, after it has tried.
        "draft_tokens": stats.draft_tokens + sum(log["tlt/draft_tokens/proposed"] for log in logs),
    }


@torch.no_grad()
def distributions(policy, ids):
    """Log-probs of all tokens where the answers were sampled, as the policy itself computes them."""
    prompt_length = ids.shape[1] - LENGTH
    return policy(ids).logits[:, prompt_length - 1 : -1].float().log_softmax(-1)


def rms(values):
    return values.square().mean().sqrt().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    print("RESULT", json.dumps(train(sys.argv[1], **json.loads(sys.argv[2]))))
