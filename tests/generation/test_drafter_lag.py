from tlt_trl.generation.drafter_lag import DrafterLag
from tlt_trl.telemetry.alarms import Alarms


def rollout(lag, alarms, policy_step, synced=True, turns=1, trained=1):
    if synced:
        lag.note_pushed()
    for _ in range(turns):
        lag.note_rollout(policy_step)
        for _ in range(trained):
            lag.note_trained()
    alarms.observe_rollout(2.0, 100.0, lag.trainings)
    return alarms.active["drafter_stale"]


def test_training_between_the_turns_of_a_tool_loop_is_no_lag():
    lag, alarms = DrafterLag(), Alarms()
    assert not any(rollout(lag, alarms, step, turns=3) for step in range(4))


def test_rollouts_of_one_policy_step_are_synced_once():
    lag, alarms = DrafterLag(), Alarms()
    for step in range(3):
        assert not any(rollout(lag, alarms, step, synced=number == 0) for number in range(4))


def test_syncs_that_do_not_come_are_noticed():
    lag, alarms = DrafterLag(), Alarms()
    assert not rollout(lag, alarms, 0)
    assert [rollout(lag, alarms, step, synced=False) for step in (1, 2)] == [False, True]
    assert not rollout(lag, alarms, 3)
