import time

import pytest
import torch
from tests.online_drafter.conftest import rollout

from tlt_trl.idle.payback import PayBack
from tlt_trl.inactive_drafter import InactiveOnlineDrafter
from tlt_trl.online_drafter import OnlineDrafter
from tlt_trl.telemetry.alarms import Alarms


def weights(online):
    return [parameter.detach().clone() for parameter in online.drafter.parameters()]


def until(condition):
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def public_methods(kind):
    return {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}


class TestOneProcess:
    def test_trains_within_its_budget(self, make_online, fill_buffer, clock):
        changes = []
        online = make_online(fill_buffer(), on_trained=lambda: changes.append("trained"))
        before = weights(online)
        rollout(online, clock)
        assert online.steps > 0 and changes == ["trained"]
        assert not all(map(torch.equal, before, weights(online)))
        metrics = online.pop_metrics()
        assert metrics["tlt/drafter/steps"] == online.steps
        assert metrics["tlt/drafter_tokens"] == online.tokens_trained > 0
        assert metrics["tlt/drafter/loss"] > 0 and metrics["tlt/drafter/acceptance_2"] > 0
        assert metrics["tlt/drafter/failures"] == metrics["tlt/drafter/starved"] == 0.0

    def test_what_is_logged_is_logged_once(self, make_online, fill_buffer, clock):
        online = make_online(fill_buffer())
        rollout(online, clock)
        first, second = online.pop_metrics(), online.pop_metrics()
        assert first["tlt/drafter/steps"] > 0 == second["tlt/drafter/steps"]
        # Neither a loss without steps, nor a buffer that is forgotten.
        assert "tlt/drafter/loss" not in second
        assert second["tlt/buffer/tokens"] == first["tlt/buffer/tokens"] == online.buffer.num_tokens

    def test_rollouts_of_one_step_add_up(self, make_online, fill_buffer, clock):
        online = make_online(fill_buffer())
        rollout(online, clock)
        online.train_after_rollout()
        assert online.pop_metrics()["tlt/drafter/steps"] == online.steps

    def test_without_a_budget_nothing_is_trained_and_nothing_starves(self, make_online, fill_buffer, clock):
        for buffer in (fill_buffer(), None):
            other, online = make_online(buffer), make_online(buffer, share=0.0)
            other.start_rollout(0)
            clock.now_s += 600.0
            other.pop_metrics()
            # Neither from what another run has left.
            online.load_state_dict(other.state_dict() | {"trainer": online.trainer.state_dict()})
            assert other.payback.plan.budget_s > 0
            rollout(online, clock, seconds=600.0)
            assert online.steps == 0 and online.pop_metrics()["tlt/drafter/starved"] == 0.0

    def test_an_evaluation_earns_no_time(self, make_online, fill_buffer, clock):
        online = make_online(fill_buffer())
        rollout(online, clock)
        with online.evaluating():
            clock.now_s += 600.0
        assert online.pop_metrics()["tlt/payback/step_s"] == 0.0

    def test_nothing_to_train_on_is_noticed(self, make_online, clock):
        alarms = Alarms()
        online = make_online(alarms=alarms)
        rollout(online, clock)
        for _ in range(4):
            assert rollout(online, clock)["tlt/drafter/starved"] == 1.0
        assert alarms.active["drafter_starved"] and online.tokens_trained == 0

    def test_a_failure_is_noticed_and_changes_nothing(self, make_online, fill_buffer, clock):
        alarms, changes = Alarms(), []
        broken = torch.zeros(3, 3), torch.zeros(3, 3)
        online = make_online(
            fill_buffer(), alarms=alarms, policy_copy=lambda: broken, on_trained=lambda: changes.append("trained")
        )
        before = weights(online)
        rollout(online, clock)
        assert online.pop_metrics()["tlt/drafter/failures"] == 1.0 and alarms.active["drafter_training_failed"]
        assert not changes and all(map(torch.equal, before, weights(online)))


class TestBackground:
    def test_trains_inside_and_not_while_paused(self, make_online, fill_buffer):
        online = make_online(fill_buffer(), in_background=True)
        with online.in_background():
            until(lambda: online.steps)
            with online.paused():
                steps = online.steps
                time.sleep(0.2)
                assert online.steps == steps
            until(lambda: online.steps > steps)
        assert online.pop_metrics()["tlt/drafter/steps"] == online.steps

    def test_does_nothing_unless_asked_to(self, make_online, fill_buffer):
        online = make_online(fill_buffer())
        with online.in_background(), online.paused():
            time.sleep(0.1)
        assert online.steps == 0 and online.pop_metrics()["tlt/idle_s"] == 0.0


class FinishedAfter:
    """The last rank has finished when it was asked for so many times."""

    def __init__(self, asked):
        self.left, self.announced, self.finished_at_s = asked, 0, None

    def announce(self):
        self.announced += 1

    def all_finished(self):
        self.left -= 1
        if self.left < 0:
            self.join()
        return self.left < 0

    def join(self):
        if self.finished_at_s is None:
            self.finished_at_s = time.perf_counter()


class TestSeveralProcesses:
    def test_trains_in_the_wait_and_counts_the_tokens_of_all(self, make_online, fill_buffer, monkeypatch, clock):
        # Another rank has trained on as many tokens, and come to the same weights.
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(2))
        wait, changes = FinishedAfter(100), []
        online = make_online(fill_buffer(), wait=wait, on_trained=lambda: changes.append("trained"), share=0.0)
        before = weights(online)
        rollout(online, clock)
        assert wait.announced == 1 and online.steps > 0 and changes == ["trained"]
        assert not all(map(torch.equal, before, weights(online)))
        metrics = online.pop_metrics()
        assert online.tokens_trained == 2 * metrics["tlt/drafter_tokens"] > 0
        assert metrics["tlt/idle_s"] > 0 and metrics["tlt/idle_added_s"] >= metrics["tlt/stop_latency_s"] >= 0

    def test_the_last_rank_takes_what_others_have_trained(self, make_online, fill_buffer, monkeypatch, clock):
        sent = []

        def other_rank_trained(tensor):
            sent.append(tensor)
            tensor.fill_(50.0 if len(sent) == 1 else 0.25)

        monkeypatch.setattr(torch.distributed, "all_reduce", other_rank_trained)
        changes = []
        online = make_online(fill_buffer(), wait=FinishedAfter(0), on_trained=lambda: changes.append(""), share=0.0)
        rollout(online, clock)
        assert online.steps == 0 and online.tokens_trained == 50 and changes == [""]
        assert all((parameter == 0.25).all() for parameter in online.trainer.parameters)
        assert online.pop_metrics()["tlt/drafter_tokens"] == 0.0

    def test_when_nobody_trained_the_drafter_is_the_engines(self, make_online, monkeypatch, clock):
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor)
        changes = []
        online = make_online(wait=FinishedAfter(100), on_trained=lambda: changes.append("trained"), share=0.0)
        rollout(online, clock)
        assert not changes and online.tokens_trained == 0

    def test_an_agreed_budget_is_trained_after_the_wait_and_before_the_merge(
        self, make_online, fill_buffer, monkeypatch, clock
    ):
        # A tensor-parallel group that is the whole world never waits.
        order = []
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: order.append(("merged", online.steps)))
        payback = PayBack(0.5, trains_in_waits=True)
        wait = FinishedAfter(0)
        online = make_online(fill_buffer(), wait=wait, payback=payback)
        rollout(online, clock)
        assert payback.plan.budget_s == pytest.approx(0.01)  # of a second, while it learns
        assert wait.announced == 1 and online.steps > 0
        assert order[0] == ("merged", online.steps)  # the number of tokens
        metrics = online.pop_metrics()
        assert metrics["tlt/payback/spent_s"] >= metrics["tlt/drafter/time_s"] > 0


class TestPausing:
    def test_nothing_is_trained_waited_for_or_recorded(self, make_online, fill_buffer, policy, clock):
        spoken, alarms, wait = [], Alarms(), FinishedAfter(100)
        online = make_online(
            fill_buffer(),
            payback=PayBack(0.5, trains_in_waits=True),
            wait=wait,
            in_background=True,
            alarms=alarms,
            speculate=spoken.append,
        )
        loss = {"tlt/speculation/saved_s": -1.0, "tlt/sync/drafter_s": 0.0, "tlt/draft_tokens/proposed": 0.0}
        while not spoken or spoken[-1]:
            online.start_rollout(0)
            clock.now_s += 1.0
            online.note_rollout(loss)
            online.pop_metrics()
            assert len(spoken) < 20
        assert alarms.active["not_paying"] and "paused, next try in 16 rollouts" in online.describe()
        online.train_after_rollout()
        with online.in_background():
            time.sleep(0.1)
        assert wait.announced == online.steps == 0
        before, ids = online.buffer.num_added, torch.arange(24).reshape(2, 12)
        online.start_scoring(is_training=True)
        with torch.no_grad(), online.recording(ids, torch.ones_like(ids), 4, 0, 0):
            policy(ids)
        assert online.buffer.num_added == before
        # A run that goes on from here is still paused, and another one is not.
        resumed = make_online(payback=PayBack(0.5, trains_in_waits=True), speculate=spoken.append)
        resumed.load_state_dict(online.state_dict())
        assert spoken[-1] is False
        resumed.start_run()
        assert spoken[-1] is True

    def test_why_nothing_was_trained_is_told(self, make_online, fill_buffer, clock, caplog):
        alarms = Alarms()
        online = make_online(fill_buffer(), share=0.0, alarms=alarms)
        for _ in range(20):
            assert not alarms.active["drafter_untrained"]
            rollout(online, clock)
        assert alarms.active["drafter_untrained"] and "`drafter_time_budget=0` leaves waits only" in caplog.text


class TestFeatures:
    def test_records_the_policys_forward_passes_inside(self, make_online, policy):
        online = make_online()
        ids = torch.arange(24).reshape(2, 12)
        online.start_rollout(0)
        online.start_scoring(is_training=True)
        with torch.no_grad():
            policy(ids)
            with online.recording(ids, torch.ones_like(ids), 4, 0, 0):
                policy(ids)
        assert online.buffer.num_tokens == 24
        assert online.pop_metrics()["tlt/feature_capture_s"] > 0

    def test_they_age_with_the_rollouts(self, make_online, fill_buffer):
        buffer = fill_buffer()
        online = make_online(buffer)
        online.start_rollout(buffer.max_age)
        assert buffer.num_tokens > 0
        online.start_rollout(buffer.max_age + 1)
        assert buffer.num_tokens == 0

    def test_another_run_counts_its_steps_anew(self, make_online, fill_buffer):
        buffer = fill_buffer()
        online = make_online(buffer)
        online.start_rollout(buffer.max_age - 1)
        online.start_run()
        online.start_rollout(0)
        assert buffer.num_tokens > 0
        online.start_rollout(1)
        assert buffer.num_tokens == 0


class TestState:
    def test_a_resumed_one_goes_on(self, make_online, make_drafter, fill_buffer, clock):
        online = make_online(fill_buffer())
        rollout(online, clock)
        online.pop_metrics()
        drafter = make_drafter()
        drafter.load_state_dict(online.drafter.state_dict())
        resumed = make_online(drafter=drafter)
        resumed.load_state_dict(online.state_dict())
        assert (resumed.steps, resumed.tokens_trained) == (online.steps, online.tokens_trained)
        assert resumed.buffer.num_tokens == online.buffer.num_tokens
        assert resumed.payback.plan == online.payback.plan
        clock.now_s += 2.0
        steps_s = [one.pop_metrics()["tlt/payback/step_s"] for one in (online, resumed)]
        assert steps_s == [2.0, 2.0] and resumed.payback.plan == online.payback.plan
        heads = online.drafter.lm_head.weight.detach(), online.drafter.lm_head.weight.detach()
        for one in (online, resumed):
            one.trainer.set_policy(*heads)
        assert online.trainer.step() == resumed.trainer.step()

    def test_it_does_not_change_with_the_drafter(self, make_online, fill_buffer, clock):
        online = make_online(fill_buffer())
        rollout(online, clock)
        moments = [
            value
            for state in online.state_dict()["trainer"]["optimizer"]["state"].values()
            for value in state.values()
        ]
        before = [moment.clone() for moment in moments]
        rollout(online, clock, seconds=3.0)
        assert before and all(map(torch.equal, before, moments))

    def test_features_are_not_copied(self, make_online, fill_buffer):
        # At the size of a real policy they take gigabytes, and they never change.
        online = make_online(fill_buffer())
        entries = online.state_dict()["buffer"]["entries"]
        for entry, sample in zip(entries, online.buffer.samples, strict=True):
            assert entry["aux_hidden_states"] is sample.aux_hidden_states

    def test_a_run_that_trains_goes_on_with_one_that_did_not(self, make_online, fill_buffer, clock):
        online, inactive = make_online(fill_buffer()), InactiveOnlineDrafter()
        rollout(online, clock)
        inactive.load_state_dict(online.state_dict())
        assert inactive.tokens_trained == online.tokens_trained > 0
        resumed = make_online()
        resumed.load_state_dict(inactive.state_dict())
        assert (resumed.tokens_trained, resumed.steps) == (online.tokens_trained, 0)


class TestInactive:
    def test_answers_all_that_a_trainer_asks(self):
        asked = public_methods(OnlineDrafter)
        assert asked and asked <= public_methods(InactiveOnlineDrafter)

    def test_does_nothing(self):
        inactive = InactiveOnlineDrafter()
        inactive.start_run()
        inactive.start_rollout(3)
        inactive.start_scoring(is_training=True)
        inactive.train_after_rollout()
        inactive.note_rollout({})
        ids = torch.arange(4).reshape(1, 4)
        with inactive.evaluating(), inactive.in_background(), inactive.paused():
            with inactive.recording(ids, torch.ones_like(ids), 2, 3, 0):
                pass
        assert inactive.pop_metrics() == {} and inactive.describe() == ""
        assert (inactive.steps, inactive.tokens_trained) == (0, 0)
