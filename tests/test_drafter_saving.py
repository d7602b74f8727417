"""The keeper of a run's drafter, without a run."""

from types import SimpleNamespace

import pytest
from transformers import TrainerState

from tlt_trl import Drafter, TLTGRPOConfig
from tlt_trl.drafter_saving import DrafterKeeper
from tlt_trl.inactive_drafter import InactiveOnlineDrafter
from tlt_trl.strategy import Strategy, make_selector
from tlt_trl.telemetry.alarms import Alarms


@pytest.fixture(scope="module")
def policy(tiny_policy_dir):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_policy_dir)


def make_keeper(policy, output_dir, rank=0, drafter=None, **options):
    args = TLTGRPOConfig(str(output_dir), use_cpu=True, bf16=False, report_to="none", **options)
    accelerator = SimpleNamespace(
        device="cpu",
        process_index=rank,
        num_processes=rank + 1,
        is_main_process=rank == 0,
        wait_for_everyone=lambda: None,
        gather=lambda tensor: tensor.repeat(rank + 1, 1),
    )
    return DrafterKeeper(
        Drafter.from_policy(policy) if drafter is None else drafter,
        args,
        accelerator,
        InactiveOnlineDrafter(),
        make_selector("fixed", [Strategy("eagle3", 2)], 4),
        Alarms(),
        policy_config=policy.config,
        policy_hub_id=lambda: None,
        state=TrainerState,
    )


def test_a_torn_policy_is_refused(policy, tmp_path):
    (tmp_path / "drafter").mkdir()
    with pytest.raises(ValueError, match="not whole: .*policy_saved is missing.* Resume from an older checkpoint"):
        make_keeper(policy, tmp_path).load_checkpoint(str(tmp_path))


def test_a_checkpoint_without_a_drafter_is_said(policy, tmp_path, caplog):
    make_keeper(policy, tmp_path).load_checkpoint(str(tmp_path))
    assert "holds no drafter" in caplog.text


def test_machines_that_share_no_folder_are_told_so(policy, tmp_path, monkeypatch, caplog):
    keeper = make_keeper(policy, tmp_path, rank=8)
    monkeypatch.setattr(TLTGRPOConfig, "should_save", False)
    with keeper.checkpoint(str(tmp_path / "checkpoint-1")):
        pass
    keeper.join()
    assert "ALARM drafter_not_saved" in caplog.text
    assert "Rank 8 does not see it" in caplog.text and "save_on_each_node=True" in caplog.text


def test_a_drafter_of_another_vocabulary_is_named_with_the_way_out(policy, tmp_path):
    import torch

    reduced = Drafter.from_policy(policy, torch.arange(0, 64, 2))
    keeper = make_keeper(policy, tmp_path, drafter=reduced)
    with keeper.checkpoint(str(tmp_path / "checkpoint-1")):
        pass
    keeper.join()
    with pytest.raises(ValueError, match="drafts over 32 tokens, the one of this run over 64.*drafter_vocab_size=32"):
        make_keeper(policy, tmp_path).load_checkpoint(str(tmp_path / "checkpoint-1"))
