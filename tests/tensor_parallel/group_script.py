"""
Trains a tiny policy with one engine over two processes: `group_script.py POLICY OUTPUT_DIR OPTIONS`, under
`accelerate launch`.

The second rank measures times that have nothing to do with those of the first one, starts from a policy of zeros and,
if asked to, loads the first rank's slice of a weight into its engine.
"""

import json
import os
import random
import sys

import torch
from tests.test_tlt_grpo_trainer import colocated_arguments, prompts, text_reward
from transformers import AutoModelForCausalLM

from tlt_trl import TLTGRPOTrainer


def measure_other_times(selector):
    """As a rank on a busy machine would."""
    update, rng = selector.update, random.Random(7)

    def update_with_noise(strategy, batch_size, emitted_tokens, seconds, **kwargs):
        update(strategy, batch_size, emitted_tokens, seconds * 10 ** rng.uniform(-2, 2), **kwargs)

    selector.update = update_with_noise


def record_choices(loop):
    """Choices of all steps, in order, and how often the leader was asked."""
    inner, choices, asked = loop.leaders_choice, [], []

    class Recorder:
        start_rollout = staticmethod(inner.start_rollout)

        def __call__(self, batch_size, choose):
            choices.append(str(inner(batch_size, lambda batch: (asked.append(batch), choose(batch))[1])))
            return loop.selector.strategies[[str(s) for s in loop.selector.strategies].index(choices[-1])]

    loop.leaders_choice = Recorder()
    return choices, asked


def save_much(online):
    """Rollouts save ten seconds, whatever they really do: what pays is trained."""
    note_rollout = online.note_rollout
    online.note_rollout = lambda metrics: note_rollout(metrics | {"tlt/speculation/saved_s": 10.0})


def load_first_half(model, wrong):
    """Lets the engine's model load the first half of the columns of a weight where the second half belongs."""
    load = model.load_weights

    def load_wrongly(weights):
        return load((name, t.roll(t.shape[1] // 2, 1) if name == wrong else t) for name, t in weights)

    model.load_weights = load_wrongly


def main():
    policy_dir, output_dir, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    wrong_policy, wrong_drafter = options.pop("wrong_policy", None), options.pop("wrong_drafter", None)
    rank = int(os.environ["LOCAL_RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(2))
    args = colocated_arguments(output_dir, vllm_tensor_parallel_size=2, **options)
    policy = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    if rank == 1:  # what `fsdp_cpu_ram_efficient_loading` leaves there until the policy is prepared
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()
    trainer = TLTGRPOTrainer(policy, text_reward, args, prompts())
    generation = trainer.vllm_generation
    loop = generation.rollout_loop
    result = {"drafter_at_start": sum(p.abs().double().sum().item() for p in trainer.drafter.parameters())}
    if rank == 1:
        measure_other_times(loop.selector)
        if wrong_policy:
            load_first_half(generation.engine.weights.policy, wrong_policy)
        if wrong_drafter:
            load_first_half(generation.engine.weights.drafter, wrong_drafter)
    save_much(trainer.online_drafter)
    choices, asked = record_choices(loop)
    try:
        trainer.train()
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"
    result |= {
        "choices": choices,
        "asked": len(asked),
        "disabled": sorted(loop.disabled),
        "logs": [log for log in trainer.state.log_history if "loss" in log],
        "drafter": sum(p.abs().double().sum().item() for p in trainer.drafter.parameters()),
        "policy": sum(p.abs().double().sum().item() for p in trainer.model.parameters()),
    }
    with open(f"{output_dir}/result_{rank}.json", "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
