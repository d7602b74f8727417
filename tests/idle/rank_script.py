"""
One rank of a small gloo group that trains a drafter while it waits.

    python rank_script.py RANK WORLD_SIZE PORT FOLDER OPTIONS

It prints one JSON line. A rank that runs into a straggler prints the error and ends with code 3.
"""

import json
import os
import signal
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tlt_trl.drafter import Drafter, DrafterTrainer, DrafterTrainingArguments, FeatureBuffer, FeatureSample
from tlt_trl.drafter.ranks import check_identical
from tlt_trl.idle.averaging import average_by_tokens
from tlt_trl.idle.spot_training import train_until_all_finished
from tlt_trl.idle.straggler_wait import StragglerError, StragglerWait
from tlt_trl.upstream import default_store


HIDDEN_SIZE, VOCAB_SIZE = 64, 128


def make_trainer(rank, num_samples):
    torch.manual_seed(0)
    policy = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=HIDDEN_SIZE,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    buffer = FeatureBuffer(max_tokens=10_000)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(num_samples):
        buffer.add(
            FeatureSample(
                torch.randint(0, VOCAB_SIZE, (40,), generator=generator),
                torch.randn(40, 3 * HIDDEN_SIZE, generator=generator),
                torch.randn(40, HIDDEN_SIZE, generator=generator),
                prompt_length=4,
                step=0,
            )
        )
    target = (policy.get_input_embeddings().weight.detach(), policy.get_output_embeddings().weight.detach())
    args = DrafterTrainingArguments(unroll_steps=2, seed=rank)
    return DrafterTrainer(Drafter.from_policy(policy), buffer, args), target


def gather(tensor):
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tensor)
    return torch.cat(parts)


def main():
    rank, world_size, port = map(int, sys.argv[1:4])
    folder, options = sys.argv[4], json.loads(sys.argv[5])
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    timeout_s, group_size = options.get("timeout_s", 60.0), options.get("group_size", 1)
    wait = StragglerWait(default_store(), rank, world_size, timeout_s, group_size)
    trainer, target = make_trainer(rank, options.get("samples", [8] * world_size)[rank])
    torch.distributed.barrier()
    reports = []
    for seconds in options["rollout_s"]:
        if seconds[rank] is None:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds[rank])
        try:
            wait.announce()
            report = train_until_all_finished(trainer, wait, target)
        except StragglerError as error:
            print(json.dumps({"error": str(error)}), flush=True)
            os._exit(3)  # the process group can no longer be taken down in order
        parameters = list(trainer.drafter.parameters())
        all_tokens = average_by_tokens(parameters, report.tokens, torch.distributed.all_reduce)
        check_identical(trainer.drafter, gather)
        reports.append(report.numbers() | {"all_tokens": all_tokens})
    torch.save(trainer.drafter.state_dict(), os.path.join(folder, f"drafter_{rank}.pt"))
    print(json.dumps({"reports": reports}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
