"""
One rank of a small group whose engines exchange samples.

    python rank_script.py RANK PORT POLICY DRAFTER OPTIONS

Rank 0 has `samples` prompts and the other one none. Steps are slowed down, so that a smaller batch is a faster one. It
prints one JSON line.
"""

import dataclasses
import json
import sys
import time

import torch
from torch.distributed import TCPStore

from tlt_trl.generation.engine import RolloutEngine
from tlt_trl.generation.rollout_loop import RolloutLoop
from tlt_trl.generation.standalone import build_llm
from tlt_trl.idle.straggler_wait import StragglerWait
from tlt_trl.sample_reallocation import SampleReallocation
from tlt_trl.strategy import Strategy, make_selector


def slow_down(engine, seconds_per_sample):
    step = engine.step

    def slow_step():
        outputs, done = step()
        if done is None:
            return outputs, None
        slow_s = seconds_per_sample * done.batch_size
        time.sleep(slow_s)
        return outputs, dataclasses.replace(done, seconds=done.seconds + slow_s)

    engine.step = slow_step


def generate(llm, loop, number, max_tokens, seed):
    from vllm import SamplingParams

    loop.engine.reset_prefix_cache()
    prompts = torch.randint(4, 32, (number, 4), generator=torch.Generator().manual_seed(seed)).tolist()
    torch.manual_seed(seed)
    params = SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False) if prompts else []
    return [
        {
            "prompt": output.prompt_token_ids,
            "token_ids": list(output.outputs[0].token_ids),
            "logprobs": [
                step[token].logprob
                for step, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
            ],
        }
        for output in outputs
    ]


def main():
    rank, port = map(int, sys.argv[1:3])
    policy, drafter, options = sys.argv[3], sys.argv[4], json.loads(sys.argv[5])
    store = TCPStore("127.0.0.1", port, is_master=rank == 0)
    llm = build_llm(
        policy,
        drafter=drafter,
        max_draft_tokens=3,
        max_num_seqs=16,
        max_model_len=options["max_tokens"] + 8,
        kv_cache_memory_bytes=2**27,
        dtype="float32",
        enforce_eager=True,
        seed=rank,
    )
    engine = RolloutEngine(llm)
    slow_down(engine, options["seconds_per_sample"])
    loop = llm.rollout_loop = RolloutLoop(engine, make_selector("fixed", [Strategy("eagle3", 3)], 16))
    wait = StragglerWait(store, rank, 2, 120.0)
    reallocation = SampleReallocation(loop, store, rank, 2, options["max_tokens"])
    wait.announce()  # both engines are there
    wait.join()
    rollouts = []
    for seed in range(options["rollouts"]):
        began_s = time.perf_counter()
        with reallocation.rollout():
            samples = generate(llm, loop, options["samples"][rank], options["max_tokens"], seed)
            wait.announce()
            reallocation.stand_by()
            while not wait.all_finished():
                if reallocation.has_work():
                    reallocation.serve()
                else:
                    reallocation.rest()
            wait.join()
        metrics = reallocation.pop_metrics(dict)
        rollouts.append({"samples": samples, "metrics": metrics, "seconds": time.perf_counter() - began_s})
    print(json.dumps(rollouts), flush=True)
    if rank == 0:
        store.wait(["done"])  # the store lives here
    else:
        store.set("done", "")


if __name__ == "__main__":
    main()
