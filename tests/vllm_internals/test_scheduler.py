"""What the scheduler is asked and what a step did, with a stand-in for vLLM's scheduler."""

from types import SimpleNamespace

import pytest

from tlt_trl.strategy import Strategy
from tlt_trl.vllm_internals.contract import UnsupportedEngineError
from tlt_trl.vllm_internals.scheduler import SteeredScheduler


OFF, TWO, LOOKUP = Strategy.off(), Strategy("eagle3", 2), Strategy("ngram", 3)


class Scheduler:
    """As much of vLLM's scheduler as is tapped."""

    def __init__(self):
        self.dynamic_sd_lookup = [0, 5]
        self.requests = {}
        self.running = []
        self.handed_over = []

    def add_request(self, request):
        self.requests[request.request_id] = request

    def update_from_output(self, scheduler_output, model_runner_output):
        new = [SimpleNamespace(new_token_ids=tokens) for tokens in model_runner_output.sampled_token_ids]
        return {0: SimpleNamespace(outputs=new)}

    def update_draft_token_ids(self, draft_token_ids):
        self.handed_over.append(draft_token_ids.draft_token_ids)


class Steps:
    """A steered scheduler, and the calls that vLLM's engine core makes."""

    def __init__(self, *choices, can_look_up=True):
        self.applied = []
        self.scheduler = Scheduler()
        self.steered = SteeredScheduler(self.scheduler, 5, can_look_up, self.applied.append)
        chosen = iter(choices)
        self.steered.choose = lambda batch_size: next(chosen)

    def schedule(self, batch_size=1):
        return self.scheduler.dynamic_sd_lookup[batch_size]

    def finish(self, sampled=((7,),), drafts=None, is_first=False, context=10):
        ids = [str(i) for i in range(len(sampled))]
        drafts = dict(zip(ids, drafts or [()] * len(ids), strict=True))
        output = SimpleNamespace(
            num_scheduled_tokens={i: 4 if is_first else 1 + len(drafts[i]) for i in ids},
            scheduled_spec_decode_tokens={i: tokens for i, tokens in drafts.items() if tokens},
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[] if is_first else ids, num_computed_tokens=[] if is_first else [context] * len(ids)
            ),
        )
        result = SimpleNamespace(
            sampled_token_ids=list(map(list, sampled)), req_id_to_index={name: row for row, name in enumerate(ids)}
        )
        self.scheduler.update_from_output(output, result)
        return self.steered.pop_step(0.5)


def test_a_step_verifies_what_the_one_before_it_proposed():
    steps = Steps(TWO, TWO, OFF, OFF)
    assert steps.schedule() == 2
    first = steps.finish(is_first=True)
    assert (first.verified, first.proposed, first.has_prefill, first.seconds) == (OFF, TWO, True, 0.5)
    steps.schedule()
    second = steps.finish(sampled=[(5, 6), (7,)], drafts=[(5, 9), (4, 4)])
    assert (second.verified, second.proposed) == (TWO, TWO)
    assert (second.batch_size, second.num_verified, second.drafts, second.draft_tokens) == (2, 2, 2, 4)
    assert (second.drafted_by_position, second.accepted_by_position) == ((2, 2), (1, 0))
    assert (second.emitted_tokens, second.context_tokens, second.has_prefill) == (3, 20, False)
    assert steps.schedule() == 0
    third = steps.finish(drafts=[(1, 2)])
    assert (third.verified, third.proposed) == (TWO, OFF)
    steps.schedule()
    assert steps.finish().verified == OFF
    assert steps.applied == [TWO, TWO, OFF, OFF]


def test_an_asynchronous_scheduler_runs_ahead():
    steps = Steps(TWO, TWO, OFF, OFF)
    steps.schedule()
    steps.schedule()  # the second step, before the first is done
    assert steps.finish(is_first=True).proposed == TWO
    steps.schedule()
    second = steps.finish()
    assert (second.verified, second.proposed) == (TWO, TWO)
    third = steps.finish()
    assert (third.verified, third.proposed) == (TWO, OFF)


def test_the_first_step_of_a_rollout_verifies_nothing():
    steps = Steps(TWO, TWO)
    steps.schedule()
    steps.finish(is_first=True)
    steps.schedule()
    assert steps.finish(is_first=True).verified == OFF


def test_nothing_is_left_of_an_interrupted_rollout():
    steps = Steps(TWO, TWO, OFF)
    steps.schedule()
    steps.steered.reset()
    steps.schedule()
    assert steps.finish(is_first=True).proposed == TWO
    assert steps.steered.pop_step(0.5) is None


def test_draft_tokens_are_looked_up_in_place_of_the_drafters():
    steps = Steps(LOOKUP, TWO)
    request = SimpleNamespace(
        is_finished=lambda: False, is_prefill_chunk=False, prompt_token_ids=[1, 2], _output_token_ids=[3]
    )
    prefill = SimpleNamespace(**vars(request) | {"is_prefill_chunk": True})
    steps.scheduler.requests = {"a": request, "b": prefill}
    asked = []
    steps.steered.look_up = lambda *call: asked.append(call) or [8, 9]
    assert steps.schedule() == 0  # the drafter is asked for nothing
    steps.finish(is_first=True)
    steps.scheduler.update_draft_token_ids(SimpleNamespace(req_ids=["a", "b", "gone"], draft_token_ids=[[], [], []]))
    assert steps.scheduler.handed_over == [[[8, 9], [], []]]
    assert asked == [("a", [1, 2], [3], 3)]
    steps.schedule()
    assert steps.finish(drafts=[(8, 9)]).verified == LOOKUP
    drafted = SimpleNamespace(req_ids=["a"], draft_token_ids=[[4, 5]])
    steps.scheduler.update_draft_token_ids(drafted)
    assert steps.scheduler.handed_over[-1] == [[4, 5]]


def test_steps_with_a_request_that_cannot_be_exact_are_plain():
    steps = Steps(TWO, TWO)
    steps.steered.is_exact = lambda params: params != "min_tokens"
    requests = [SimpleNamespace(request_id=name, sampling_params=name) for name in ("a", "min_tokens")]
    for request in requests:
        steps.scheduler.add_request(request)
    steps.scheduler.running = requests[:1]
    assert steps.schedule() == 2  # the other one is waiting
    steps.scheduler.running = requests
    assert steps.schedule() == 0
    del steps.scheduler.requests["min_tokens"]
    assert steps.schedule() == 2
    assert steps.applied == [TWO, OFF, TWO]


def test_a_strategy_that_the_engine_was_not_built_for_is_an_error():
    with pytest.raises(ValueError, match="eagle3 x6 asks for more than the 5 draft tokens"):
        Steps(Strategy("eagle3", 6)).schedule()
    with pytest.raises(ValueError, match="ngram x3 cannot be used.*asynchronously"):
        Steps(LOOKUP, can_look_up=False).schedule()


def test_one_scheduler_is_steered_once():
    steps = Steps()
    with pytest.raises(RuntimeError, match="driven by one `RolloutEngine` only"):
        SteeredScheduler(steps.scheduler, 5, True, print)


def test_a_name_that_has_moved_is_an_error_with_the_versions():
    scheduler = Scheduler()
    del scheduler.dynamic_sd_lookup
    with pytest.raises(
        UnsupportedEngineError,
        match="`dynamic_sd_lookup` was not found on Scheduler.*vllm.*0.31",
    ):
        SteeredScheduler(scheduler, 5, True, print)
