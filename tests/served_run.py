"""
Run by `test_served_acceptance.py` in processes of their own.

Usage: served_run.py train POLICY_DIR OUTPUT_DIR JSON_FILE, which trains, evaluates and saves policy and drafter, and
served_run.py serve OUTPUT_DIR JSON_FILE, which has nothing of this package but what vLLM loads as a plugin.
"""

import json
import sys
from dataclasses import replace


NUM_DRAFT_TOKENS = 3
MAX_COMPLETION_LENGTH = 32
NUM_PROMPTS = 80
# A random policy at temperature 1 cannot be drafted; a cold one on few prompts repeats itself enough to be learnt.
NUM_DISTINCT_PROMPTS = 4
TEMPERATURE = 0.3


def train(policy_dir: str, output_dir: str, json_file: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward
    from tlt_trl import Drafter, TLTGRPOTrainer
    from tlt_trl.drafter.pretraining import PRETRAINING_ARGUMENTS, DrafterWarmup

    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    few = prompts(NUM_DISTINCT_PROMPTS)
    dataset = few.select([i % len(few) for i in range(NUM_PROMPTS)])
    ids = torch.tensor([tokenizer(row["prompt"])["input_ids"] for row in dataset])
    answers = policy.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=MAX_COMPLETION_LENGTH,
        top_k=0,
        temperature=TEMPERATURE,
    )
    width = ids.shape[1]
    sequences = [(row[:width].tolist(), row[width:].tolist()) for row in answers]
    drafter = Drafter.from_policy(policy)
    training = replace(
        PRETRAINING_ARGUMENTS, unroll_steps=NUM_DRAFT_TOKENS, learning_rate=3e-3, temperature=TEMPERATURE
    )
    warmup = DrafterWarmup(policy, drafter, args=training)
    warmup.add(sequences)
    warmup.train(epochs=40)
    args = colocated_arguments(
        output_dir,
        temperature=TEMPERATURE,
        max_completion_length=MAX_COMPLETION_LENGTH,
        speculation_selector="fixed",
        speculation_strategies=[f"eagle3 x{NUM_DRAFT_TOKENS}"],
        per_device_eval_batch_size=32,
        max_steps=2,
        learning_rate=1e-6,
    )
    trainer = TLTGRPOTrainer(policy_dir, text_reward, args, dataset, eval_dataset=dataset, drafter=drafter)
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    saved = Drafter.from_pretrained(trainer.save_drafter(), trainer.model.config)
    pairs = zip(saved.state_dict().values(), trainer.drafter.state_dict().values(), strict=True)
    result = {
        "acceptance_length": metrics["eval_tlt/acceptance_length"],
        "draft_tokens": metrics["eval_tlt/draft_tokens/proposed"],
        "every_tensor_equal": all(torch.equal(a, b.cpu()) for a, b in pairs),
        "drafter_steps": trainer.online_drafter.steps,
        "prompts": ids.tolist() * args.num_generations,
    }
    with open(json_file, "w") as file:
        json.dump(result, file)


def serve(output_dir: str, json_file: str) -> None:
    from vllm import LLM, SamplingParams

    with open(json_file) as file:
        prompts = json.load(file)["prompts"]
    llm = LLM(
        output_dir,
        speculative_config={
            "method": "eagle3",
            "model": f"{output_dir}/drafter",
            "num_speculative_tokens": NUM_DRAFT_TOKENS,
        },
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=32,
        kv_cache_memory_bytes=2**28,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=MAX_COMPLETION_LENGTH, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    drafts = counters["vllm:spec_decode_num_drafts"]
    result = {
        "acceptance_length": 1.0 + counters["vllm:spec_decode_num_accepted_tokens"] / drafts,
        "drafts": drafts,
        "modules": sorted(name for name in sys.modules if name.startswith("tlt_trl")),
    }
    with open(json_file, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    {"train": train, "serve": serve}[sys.argv[1]](*sys.argv[2:])
