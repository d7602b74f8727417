import json
from types import SimpleNamespace

import pytest
import torch
from tests.online_drafter.conftest import one_process, rollout

from tlt_trl.drafter import FeatureBuffer
from tlt_trl.drafter_saving import DrafterKeeper
from tlt_trl.inactive_drafter import InactiveOnlineDrafter
from tlt_trl.strategy import Strategy, make_selector
from tlt_trl.telemetry.alarms import Alarms


@pytest.fixture
def make_keeper(policy, make_drafter, tmp_path):
    """A keeper of a run in `tmp_path`; keywords other than those of the class are fields of the configuration."""

    def make(drafter=None, online=None, accelerator=None, strategies=("off", "eagle3 x2"), state=None, **fields):
        defaults = {
            "output_dir": str(tmp_path),
            "should_save": True,
            "save_only_model": False,
            "save_on_each_node": False,
            "save_total_limit": None,
            "drafter_push_to_hub": False,
            "drafter_hub_model_id": None,
            "hub_model_id": None,
            "hub_private_repo": None,
            "hub_revision": None,
            "hub_token": None,
            "hub_always_push": False,
        }
        hub_id = fields.pop("policy_hub_id", None)
        state = SimpleNamespace(global_step=7, log_history=[], best_model_checkpoint=None) if state is None else state
        return DrafterKeeper(
            make_drafter() if drafter is None else drafter,
            SimpleNamespace(**defaults | fields),
            one_process() if accelerator is None else accelerator,
            InactiveOnlineDrafter() if online is None else online,
            make_selector("beg_mab", [Strategy.parse(text) for text in strategies], 8, seed=0),
            Alarms(),
            policy_config=policy.config,
            policy_hub_id=lambda: hub_id,
            state=lambda: state,
        )

    return make


def save_checkpoint(keeper, folder):
    with keeper.checkpoint(str(folder)):
        folder.mkdir(exist_ok=True)  # the policy's part
    keeper.join()
    return folder


def weights(drafter):
    return [tensor.clone() for tensor in drafter.state_dict().values()]


def is_equal(drafter, saved):
    return all(map(torch.equal, drafter.state_dict().values(), saved))


def disturb(drafter):
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(1.0)


class TestCheckpoint:
    def test_a_resumed_run_goes_on_with_drafter_training_and_alarms(
        self, make_keeper, make_online, fill_buffer, make_drafter, clock, tmp_path
    ):
        online = make_online(fill_buffer())
        rollout(online, clock)
        folder = save_checkpoint(make_keeper(online.drafter, online), tmp_path / "checkpoint-7")
        resumed = make_online(drafter=make_drafter(seed=9))
        make_keeper(resumed.drafter, resumed).load_checkpoint(str(folder))
        assert is_equal(resumed.drafter, online.drafter.state_dict().values())
        assert (resumed.steps, resumed.tokens_trained) == (online.steps, online.tokens_trained)
        assert resumed.steps > 0 and resumed.buffer.num_tokens == online.buffer.num_tokens

    def test_it_is_the_drafter_of_its_moment(self, make_keeper, tmp_path):
        keeper = make_keeper()
        saved = weights(keeper.drafter)
        folder = tmp_path / "checkpoint-7"
        with keeper.checkpoint(str(folder)):
            pass
        disturb(keeper.drafter)  # while it is being written
        keeper.join()
        assert not is_equal(keeper.drafter, saved)
        keeper.load_checkpoint(str(folder))
        assert is_equal(keeper.drafter, saved)

    def test_until_the_drafter_is_whole_older_checkpoints_stay(self, make_keeper, tmp_path):
        keeper = make_keeper(save_total_limit=1)
        first = save_checkpoint(keeper, tmp_path / "checkpoint-3")
        with keeper.checkpoint(str(tmp_path / "checkpoint-6")):
            assert (first / "drafter" / "model.safetensors").exists()
        keeper.join()
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]

    def test_weights_only(self, make_keeper, make_online, tmp_path):
        keeper = make_keeper(save_only_model=True)
        folder = save_checkpoint(keeper, tmp_path / "checkpoint-7")
        online = make_online()
        make_keeper(online.drafter, online).load_checkpoint(str(folder))
        assert is_equal(online.drafter, weights(keeper.drafter)) and online.tokens_trained == 0

    def test_other_strategies_begin_a_new_selector(self, make_keeper, tmp_path, caplog):
        keeper = make_keeper()
        folder = save_checkpoint(keeper, tmp_path / "checkpoint-7")
        other = make_keeper(strategies=("off", "eagle3 x3"))
        disturb(other.drafter)
        other.load_checkpoint(str(folder))
        assert "The selector begins anew" in caplog.text
        assert is_equal(other.drafter, weights(keeper.drafter))

    def test_with_a_folder_on_each_node_ranks_wait_for_their_own_node(self, make_keeper, tmp_path, monkeypatch):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        accelerator = one_process()
        accelerator.process_index, accelerator.num_processes = 8, 16
        accelerator.gather = lambda tensor: tensor.repeat(16, 1)
        folder = save_checkpoint(make_keeper(accelerator=accelerator, save_on_each_node=True), tmp_path / "one")
        assert json.loads((folder / "drafter" / "training" / "complete.json").read_text())["ranks"] == [8]


class TestSaving:
    def test_writes_drafter_and_card(self, make_keeper, tmp_path):
        keeper = make_keeper()
        assert keeper.save() == str(tmp_path / "drafter")
        names = {path.name for path in (tmp_path / "drafter").iterdir()}
        assert {"config.json", "model.safetensors", "provenance.json", "README.md"} <= names

    def test_only_the_rank_that_saves_writes(self, make_keeper, tmp_path):
        assert make_keeper(should_save=False).save(str(tmp_path / "there")) == str(tmp_path / "there")
        assert not (tmp_path / "there").exists()

    def test_the_card_counts_draft_tokens_from_one(self, make_keeper, tmp_path):
        log = {"step": 6, "tlt/acceptance_length": 1.75}
        log |= {"tlt/acceptance/position_1": 0.5, "tlt/acceptance/position_2": 0.25}
        state = SimpleNamespace(global_step=7, log_history=[log], best_model_checkpoint=None)
        make_keeper(state=state).save()
        card = (tmp_path / "drafter" / "README.md").read_text()
        assert "| step | acceptance length | draft token 1 | draft token 2 |" in card
        assert "| 6 | 1.750 | 0.50 | 0.25 |" in card

    def test_what_it_was_trained_from(self, make_keeper, make_online, fill_buffer, clock):
        online = make_online(fill_buffer())
        rollout(online, clock)
        log = {"step": 6, "tlt/acceptance_length": 1.75, "tlt/acceptance/position_1": 0.75}
        state = SimpleNamespace(global_step=7, log_history=[log], best_model_checkpoint=None)
        facts = make_keeper(online.drafter, online, state=state, policy_hub_id="somebody/policy").provenance()
        assert (facts["policy"], facts["policy_steps"]) == ("somebody/policy", 7)
        assert facts["drafter_steps"] == online.steps > 0 and facts["tokens_trained"] == online.tokens_trained > 0
        assert (facts["acceptance_length"], facts["acceptance_by_position"]) == (1.75, [0.75])

    @pytest.mark.parametrize(
        ("fields", "repo_id"),
        [
            ({"drafter_hub_model_id": "somebody/mine", "hub_model_id": "somebody/policy"}, "somebody/mine"),
            ({"hub_model_id": "somebody/policy"}, "somebody/policy-drafter"),
            ({"output_dir": "runs/one/"}, "one-drafter"),
        ],
    )
    def test_repository(self, make_keeper, fields, repo_id):
        assert make_keeper(**fields).repo_id == repo_id


class TestBestCheckpoint:
    def test_weights_and_facts_are_those_of_the_checkpoint_until_the_next_run(self, make_keeper, tmp_path):
        state = SimpleNamespace(global_step=3, log_history=[], best_model_checkpoint=None)
        keeper = make_keeper(state=state)
        best = save_checkpoint(keeper, tmp_path / "checkpoint-3")
        saved = weights(keeper.drafter)
        disturb(keeper.drafter)
        state.global_step = 9
        keeper.load_best(str(best))
        assert is_equal(keeper.drafter, saved) and keeper.provenance()["policy_steps"] == 3
        keeper.finish()
        for name in ("model.safetensors", "provenance.json"):
            left, kept = (folder / "drafter" / name for folder in (tmp_path, best))
            assert left.read_bytes() == kept.read_bytes(), name
        keeper.start_run()
        assert keeper.provenance()["policy_steps"] == 9

    def test_one_without_a_drafter_changes_nothing(self, make_keeper, tmp_path):
        keeper = make_keeper()
        before = weights(keeper.drafter)
        keeper.load_best(str(tmp_path))
        assert is_equal(keeper.drafter, before) and keeper.provenance()["policy_steps"] == 7


class TestPushing:
    def test_only_the_first_rank_pushes(self, make_keeper, caplog):
        accelerator = one_process()
        accelerator.is_main_process = False
        make_keeper(accelerator=accelerator, drafter_push_to_hub=True).finish()
        # Offline, a push that was begun would be reported.
        assert "was not pushed" not in caplog.text

    def test_a_push_that_fails_at_the_end_is_reported_and_stops_nothing(self, make_keeper, caplog):
        make_keeper(drafter_push_to_hub=True, drafter_hub_model_id="somebody/mine").finish()
        assert "The drafter was not pushed to somebody/mine" in caplog.text


def test_a_small_buffer_takes_what_fits_of_a_larger_one(make_keeper, make_online, fill_buffer, tmp_path):
    online = make_online(fill_buffer())
    folder = save_checkpoint(make_keeper(online.drafter, online), tmp_path / "checkpoint-7")
    small = make_online(FeatureBuffer(100))
    make_keeper(small.drafter, small).load_checkpoint(str(folder))
    assert 0 < small.buffer.num_tokens <= 100 < online.buffer.num_tokens
