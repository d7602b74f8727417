"""`vllm.LLM` whose requests all go through one step loop of ours."""

import functools
from typing import Any

from ..strategy.strategy import Strategy
from .contract import require


@functools.lru_cache(maxsize=1)
def make_rollout_llm_class(base: type) -> type:
    """
    Subclass of `vllm.LLM` that is stepped by its `rollout_loop` once that is set.

    `generate`, `chat` and `wait_for_completion` all end in `LLM._run_engine`, so whichever of them a `rollout_func`
    calls is stepped, checked and counted alike. The class is made on demand so that importing this package does not
    import vLLM.
    """
    require(base, "_run_engine")

    class RolloutLLM(base):
        rollout_loop: Any | None = None  # its `run()` finishes all requests and returns them in their order

        def _run_engine(self, *args, **kwargs):
            return super()._run_engine(*args, **kwargs) if self.rollout_loop is None else self.rollout_loop.run()

        def beam_search(self, *args, **kwargs):
            """As vLLM does it, stepping the engine by rules of its own: without drafts, and in no statistics."""
            if self.rollout_loop is None:
                return super().beam_search(*args, **kwargs)
            loop, self.rollout_loop = self.rollout_loop, None
            loop.engine.choose = lambda batch_size: Strategy.off()
            try:
                return super().beam_search(*args, **kwargs)
            finally:
                loop.engine.abort_unfinished()
                self.rollout_loop = loop

    return RolloutLLM
