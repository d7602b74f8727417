"""
Trains a tiny policy on two processes: `policy_script.py POLICY OUTPUT_DIR OPTIONS`, under `accelerate launch`.

Speculation is off in all rollouts, so that they depend on the policy and the random state alone.
"""

import json
import os
import sys
import time

import torch
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward

from tlt_trl import TLTGRPOTrainer


def slow_down(trainer):
    """Lets the training rollouts of this rank take longer; what comes before them, ranks do together."""
    loop = trainer.vllm_generation.rollout_loop
    run = loop.run

    def run_late():
        if trainer.model.training:
            time.sleep(0.5)
        return run()

    loop.run = run_late


def main():
    policy, output_dir, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    evaluate_first = options.pop("evaluate_first", False)
    rank = int(os.environ["LOCAL_RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(2))
    args = colocated_arguments(output_dir, speculation_selector="fixed", speculation_activation_threshold=0, **options)
    trainer = TLTGRPOTrainer(policy, text_reward, args, prompts(), eval_dataset=prompts(4))
    if rank == 1:
        slow_down(trainer)
    drafter_before = [parameter.detach().clone() for parameter in trainer.drafter.trained_parameters()]
    if evaluate_first:
        trainer.evaluate()
    trainer.train()
    torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), f"{output_dir}/policy_{rank}.pt")
    result = {
        "logs": [log for log in trainer.state.log_history if "loss" in log],
        "drafter_moved": not all(map(torch.equal, drafter_before, trainer.drafter.trained_parameters())),
        "drafter_sum": sum(parameter.double().sum().item() for parameter in trainer.drafter.parameters()),
    }
    with open(f"{output_dir}/result_{rank}.json", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
