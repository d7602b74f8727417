"""
One rank that builds its drafter from something else than rank 0 has, as ranks of a real run may.

    python start_script.py RANK WORLD_SIZE PORT FOLDER OPTIONS

It prints one JSON line.
"""

import json
import os
import sys
import tempfile
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from tests.drafter.test_source import WordTokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tlt_trl.drafter import Drafter
from tlt_trl.drafter.ranks import DraftersDifferError, check_identical, drafter_of_first_rank
from tlt_trl.drafter.source import build_drafter
from tlt_trl.generation.ranks import OtherRankFailedError, drafter_folder, failing_together


def make_policy():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=8,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


def build(policy, words, layers):
    """As the trainer does, from a data set with these words and from these layers of the policy."""
    given = None if layers is None else Drafter.from_policy(policy, aux_hidden_state_layer_ids=layers)
    return build_drafter(
        policy,
        given=given,
        name_or_path=None,
        vocab_size=6,
        train_dataset=[{"prompt": words}],
        tokenizer=WordTokenizer(),
        gather_params=lambda parameters: nullcontext(),
    )


def difference(drafter, accelerator):
    """What the comparison of all ranks says; empty when they agree."""
    try:
        check_identical(drafter, accelerator.gather)
    except DraftersDifferError as error:
        return str(error)
    return ""


def failure(accelerator, fails):
    """What a rank says that goes on, or not, together with the others."""
    try:
        with failing_together(accelerator):
            if fails:
                raise ValueError("no room")
    except (ValueError, OtherRankFailedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main():
    rank, world_size, port, folder = *map(int, sys.argv[1:4]), sys.argv[4]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accelerator = Accelerator(cpu=True)
    policy = make_policy()
    options = json.loads(sys.argv[5])[f"rank_{rank}"]
    if options.get("zeros"):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.zero_()
    drafter = build(policy, options.get("words", "7 7 9 11 12"), options.get("layers"))
    result = {"apart": difference(drafter, accelerator)}
    random_state = torch.get_rng_state()
    drafter = drafter_of_first_rank(drafter)
    result["random_state_is_kept"] = torch.equal(random_state, torch.get_rng_state())
    result["together"] = difference(drafter, accelerator)
    result["layers"] = drafter.config.eagle_aux_hidden_state_layer_ids
    result["failure"] = failure(accelerator, fails=rank == 1)
    tempfile.tempdir = folder
    with drafter_folder(drafter, accelerator) as shared:
        result["folders"] = os.listdir(folder)
        result["loads"] = all(
            map(torch.equal, Drafter.from_pretrained(shared).state_dict().values(), drafter.state_dict().values())
        )
        accelerator.wait_for_everyone()
    torch.save(drafter.state_dict(), os.path.join(folder, f"drafter_{rank}.pt"))
    print(json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
