"""GRPO with speculative rollouts in 20 lines: a policy learns to answer briefly. Usage: minimal.py [MODEL STEPS]"""

import sys

import torch
from datasets import Dataset

from tlt_trl import TLTGRPOConfig, TLTGRPOTrainer


def brevity(completions, **kwargs):
    return [-len(completion) / 100 for completion in completions]


model, steps = sys.argv[1:] or ("Qwen/Qwen2.5-0.5B-Instruct", 50)
prompts = [{"prompt": f"Tell me about an animal that begins with {letter}."} for letter in "abcdefghijklmnop"]
use_cpu = not torch.cuda.is_available()
args = TLTGRPOConfig("runs/minimal", use_vllm=True, vllm_mode="colocate", max_steps=int(steps), use_cpu=use_cpu)
trainer = TLTGRPOTrainer(model, brevity, args, train_dataset=Dataset.from_list(prompts))
trainer.train()  # leaves the drafter in runs/minimal/drafter
