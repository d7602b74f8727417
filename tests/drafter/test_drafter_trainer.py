import copy

import pytest
import torch
from tests.tolerance import forward_operations, tolerance

from tlt_trl.drafter import Drafter, DrafterTrainer, DrafterTrainingArguments, FeatureBuffer
from tlt_trl.drafter.training_report import StepOutcome


@pytest.fixture
def make_trainer(policy, make_drafter, fill_buffer):
    def make(buffer=None, drafter=None, clock=None, **arguments):
        options = {} if clock is None else {"clock": clock}
        arguments = {"max_tokens_per_step": 100, "unroll_steps": 3} | arguments
        drafter = make_drafter() if drafter is None else drafter
        args = DrafterTrainingArguments(**arguments)
        trainer = DrafterTrainer(drafter, fill_buffer() if buffer is None else buffer, args, **options)
        trainer.set_policy(policy.get_input_embeddings().weight, policy.get_output_embeddings().weight)
        return trainer

    return make


def weights(drafter):
    return {name: tensor.clone() for name, tensor in drafter.named_parameters()}


def is_equal(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("draft_token_ids", [None, torch.arange(0, 128, 2)])
def test_learns(make_trainer, make_drafter, fill_buffer, draft_token_ids):
    # Few samples and a high learning rate: it learns them by heart in a second.
    trainer = make_trainer(fill_buffer(num_rows=4), make_drafter(draft_token_ids), learning_rate=5e-3)
    before = trainer.evaluate(trainer.buffer.samples)
    assert set(before) >= {"loss", "acceptance_1", "sampled_acceptance_3", "acceptance_length"}
    for _ in range(80):
        result = trainer.step()
    after = trainer.evaluate(trainer.buffer.samples)
    assert after["loss"] < 0.7 * before["loss"]
    assert after["acceptance_1"] > before["acceptance_1"] + 0.2
    assert after["acceptance_length"] > before["acceptance_length"] + 0.3
    assert after["acceptance_1"] <= after["sampled_acceptance_1"] + 0.2
    assert trainer.steps == 80
    assert trainer.tokens_trained > 80 * 50
    assert result.tokens <= 100


def test_first_step_metrics_match_evaluation(make_trainer):
    trainer = make_trainer(max_tokens_per_step=1000, autocast_dtype=torch.float32)
    evaluated, trained = trainer.evaluate(trainer.buffer.samples), trainer.step().metrics
    operations = 3 * forward_operations(trainer.drafter.config, num_tokens=24) + len(trainer.buffer)
    for name in ("acceptance_1", "acceptance_3", "loss_2", "acceptance_length"):
        assert trained[name] == pytest.approx(evaluated[name], abs=tolerance(torch.float32, operations, scale=10.0))


def test_leaves_the_global_random_state_alone(make_trainer):
    trainer = make_trainer()
    before = torch.get_rng_state()
    trainer.step()
    trainer.train_for(0.05)
    trainer.evaluate(trainer.buffer.samples[:2])
    assert torch.equal(torch.get_rng_state(), before)


def test_touches_nothing_of_the_policy(make_trainer, policy):
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    make_trainer().train_for(0.2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_resume_gives_identical_steps(make_trainer):
    trainer = make_trainer()
    for _ in range(5):
        trainer.step()
    resumed = make_trainer(copy.deepcopy(trainer.buffer), copy.deepcopy(trainer.drafter), seed=99)
    resumed.load_state_dict(copy.deepcopy(trainer.state_dict()))
    for _ in range(3):
        assert trainer.step() == resumed.step()
    assert is_equal(weights(trainer.drafter), weights(resumed.drafter))
    assert (resumed.steps, resumed.tokens_trained) == (trainer.steps, trainer.tokens_trained)


@pytest.mark.parametrize("draft_token_ids", [None, torch.arange(0, 128, 2)])
def test_the_policys_head_is_not_trained_and_follows_the_policy(make_trainer, policy, draft_token_ids):
    trainer = make_trainer(drafter=Drafter.from_policy(policy, draft_token_ids))
    head = trainer.drafter.lm_head.weight
    before = head.clone()
    assert trainer.step().has_trained
    assert torch.equal(head, before) and head.grad is None
    assert len(trainer.optimizer.state) == len(list(trainer.drafter.parameters())) - 1
    moved = policy.get_output_embeddings().weight + 1.0
    trainer.set_policy(policy.get_input_embeddings().weight, moved)
    trainer.evaluate(trainer.buffer.samples[:2])
    assert torch.equal(head, moved[trainer.drafter.draft_token_ids].bfloat16().float())


def test_a_head_of_its_own_is_trained(make_trainer, policy):
    trainer = make_trainer(drafter=Drafter.from_policy(policy, head="own"))
    before = trainer.drafter.lm_head.weight.clone()
    trainer.step()
    assert not torch.equal(trainer.drafter.lm_head.weight, before)


def test_nothing_to_train_on(make_trainer, make_sample):
    assert make_trainer(FeatureBuffer(max_tokens=10)).step().outcome is StepOutcome.STARVED
    buffer = FeatureBuffer(max_tokens=10)
    buffer.add(make_sample(2, prompt_length=2))
    assert make_trainer(buffer).step().outcome is StepOutcome.STARVED
    report = make_trainer(FeatureBuffer(max_tokens=10)).train_for(1.0)
    assert (report.steps, report.starved) == (0, 1)
    assert make_trainer(FeatureBuffer(max_tokens=10)).train_for(0.0).starved == 0


class TestFaults:
    def test_a_batch_with_nan_is_dropped(self, make_trainer, policy):
        trainer = make_trainer()
        trainer.step()
        before, optimizer = weights(trainer.drafter), copy.deepcopy(trainer.optimizer.state_dict())
        embed_tokens = policy.get_input_embeddings().weight
        trainer.set_policy(embed_tokens, torch.full_like(embed_tokens, float("nan")))
        assert trainer.step().outcome is StepOutcome.DROPPED
        assert is_equal(weights(trainer.drafter), before)
        assert str(trainer.optimizer.state_dict()) == str(optimizer)
        assert trainer.steps == 1
        trainer.set_policy(embed_tokens, policy.get_output_embeddings().weight)
        assert trainer.step().has_trained

    def test_broken_weights_are_replaced_by_the_last_good_ones(self, make_trainer):
        trainer = make_trainer()
        good = weights(trainer.drafter)
        trainer.step()
        with torch.no_grad():
            trainer.drafter.fc.weight[0, 0] = float("nan")
        assert trainer.step().outcome is StepOutcome.DROPPED
        assert is_equal(weights(trainer.drafter), good)
        assert trainer.step().has_trained

    def test_what_a_period_takes_is_given_back(self, make_trainer, policy):
        trainer = make_trainer()
        trainer.step()
        trainer.end_period()
        with pytest.raises(RuntimeError, match="set_policy"):
            trainer.step()
        trainer.set_policy(policy.get_input_embeddings().weight, policy.get_output_embeddings().weight)
        merged = weights(trainer.drafter)
        trainer.step()
        assert not is_equal(weights(trainer.drafter), merged)
        trainer.restore_good_state()  # that of the new period
        assert is_equal(weights(trainer.drafter), merged) and trainer.steps == 1

    def test_nothing_but_faults_ends(self, make_trainer, policy):
        trainer = make_trainer()
        embed_tokens = policy.get_input_embeddings().weight
        trainer.set_policy(embed_tokens, torch.full_like(embed_tokens, float("nan")))
        result = trainer.train_for(0.1)
        assert result.steps == 0
        assert trainer.dropped_batches > 0


class StopAt:
    """True from the n-th time that it is asked."""

    def __init__(self, number):
        self.number, self.asked = number, 0

    def __call__(self):
        self.asked += 1
        return self.asked >= self.number


class TestInterruptedStep:
    UNROLL_STEPS = 3

    @pytest.mark.parametrize("asked", range(1, 2 * UNROLL_STEPS + 1))
    def test_leaves_everything_as_it_was(self, make_trainer, asked):
        trainer = make_trainer(unroll_steps=self.UNROLL_STEPS)
        trainer.step()
        before, optimizer = weights(trainer.drafter), copy.deepcopy(trainer.optimizer.state_dict())
        stop = StopAt(asked)
        assert trainer.step(stop=stop).outcome is StepOutcome.INTERRUPTED
        assert stop.asked == asked  # at once, half of them in the backward pass
        assert is_equal(weights(trainer.drafter), before)
        assert str(trainer.optimizer.state_dict()) == str(optimizer)
        assert all(parameter.grad is None for parameter in trainer.drafter.parameters())
        assert trainer.steps == 1
        assert trainer.step().has_trained

    def test_is_not_asked_once_the_last_draft_step_is_through(self, make_trainer):
        asked, plain = make_trainer(unroll_steps=self.UNROLL_STEPS), make_trainer(unroll_steps=self.UNROLL_STEPS)
        stop = StopAt(2 * self.UNROLL_STEPS + 1)
        assert asked.step(stop=stop) == plain.step()
        assert stop.asked == 2 * self.UNROLL_STEPS
        assert is_equal(weights(asked.drafter), weights(plain.drafter))

    def test_is_neither_counted_nor_timed_as_training(self, make_trainer):
        trainer = make_trainer(unroll_steps=self.UNROLL_STEPS)
        per_step = 1 + 2 * self.UNROLL_STEPS
        report = trainer.train_for(60.0, stop=StopAt(2 * per_step + 3))
        assert (report.steps, report.interrupted) == (2, 1) and trainer.steps == 2
        assert 0 < report.step_time_s < report.time_s
        assert trainer.train_for(60.0, stop=StopAt(per_step + 1)).interrupted == 0


class Clock:
    """Stands still between steps."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s + 1e-9


class TestTrainFor:
    def test_stays_within_the_budget(self, make_trainer, monkeypatch):
        clock = Clock()
        trainer = make_trainer(clock=clock)
        step = trainer.step

        def slow_step(*args):
            clock.now_s += 0.05
            return step(*args)

        monkeypatch.setattr(trainer, "step", slow_step)
        assert trainer.train_for(0.0).steps == 0
        trainer.train_for(0.01)  # the first step of all has no estimate
        assert trainer.steps == 1
        report = trainer.train_for(0.42)
        assert report.steps == 8 and report.time_s == pytest.approx(0.4)
        assert trainer.train_for(0.01).steps == 0

    def test_stops_between_two_steps(self, make_trainer):
        trainer = make_trainer()
        result = trainer.train_for(60.0, stop=lambda: trainer.steps >= 4)
        assert result.steps == 4
        assert result.tokens == trainer.tokens_trained
        assert result.starved == 0
        assert result.means()["loss"] > 0


@pytest.mark.parametrize(
    "arguments", [{"learning_rate": 0.0}, {"unroll_steps": 0}, {"temperature": -1.0}, {"max_tokens_per_step": 0}]
)
def test_bad_arguments_are_named(make_trainer, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        make_trainer(**arguments)


def test_target_must_fit(make_trainer, make_drafter):
    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"lm_head has shape \(100, 64\).*\(128, 64\)"):
        trainer.set_policy(torch.zeros(128, 64), torch.zeros(100, 64))
    with pytest.raises(RuntimeError, match="set_policy"):
        DrafterTrainer(make_drafter(), FeatureBuffer(max_tokens=10)).step()
