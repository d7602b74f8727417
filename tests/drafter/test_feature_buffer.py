import pytest
import torch

from tlt_trl.drafter import FeatureBuffer


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_is_bounded_in_tokens(make_sample):
    buffer = FeatureBuffer(max_tokens=50)
    for step in range(20):
        buffer.start_step(step)
        buffer.add(make_sample(12, step=step))
        assert buffer.num_tokens == sum(sample.num_tokens for sample in buffer.samples) <= 50
    assert [sample.step for sample in buffer.samples] == [16, 17, 18, 19]
    assert not buffer.add(make_sample(51, step=19))


def test_old_steps_go_first_then_short_answers(make_sample):
    buffer = FeatureBuffer(max_tokens=60)
    for num_tokens, step in [(30, 0), (10, 1), (20, 1)]:
        buffer.add(make_sample(num_tokens, step=step))
    buffer.add(make_sample(25, step=1))
    assert [sample.num_tokens for sample in buffer.samples] == [10, 20, 25]
    buffer.add(make_sample(15, step=1))
    assert [sample.num_tokens for sample in buffer.samples] == [20, 25, 15]


def test_keeps_the_previous_step_but_not_for_ever(make_sample):
    buffer = FeatureBuffer(max_tokens=1000, max_age=2)
    buffer.add(make_sample(10, step=0))
    for step, expected in [(1, 1), (2, 1), (3, 0)]:
        buffer.start_step(step)
        assert len(buffer) == expected
    assert buffer.num_tokens == 0


def test_batches_prefer_long_answers_of_earlier_steps(make_sample):
    buffer = FeatureBuffer(max_tokens=10_000, long_answer_fraction=0.5)
    for seed in range(20):
        buffer.add(make_sample(100 if seed < 5 else 10, step=0, seed=seed))
    buffer.start_step(1)
    for seed in range(100):
        buffer.add(make_sample(10, step=1, seed=seed))
    batch = buffer.sample_batch(400, generator())
    assert sum(sample.num_tokens for sample in batch if sample.num_tokens == 100) >= 200
    assert sum(sample.num_tokens for sample in batch) <= 400


def test_every_sample_is_used_equally_often(make_sample):
    buffer = FeatureBuffer(max_tokens=10_000, long_answer_fraction=0.0)
    for seed in range(12):
        buffer.add(make_sample(10, seed=seed))
    counts = dict.fromkeys(map(id, buffer.samples), 0)
    rng = generator()
    for _ in range(9):
        batch = buffer.sample_batch(40, rng)
        assert len({id(sample) for sample in batch}) == 4
        for sample in batch:
            counts[id(sample)] += 1
    assert set(counts.values()) == {3}


def test_draws_are_those_of_the_generator(make_sample):
    draws = []
    for _ in range(2):
        buffer = FeatureBuffer(max_tokens=10_000)
        for seed in range(12):
            buffer.add(make_sample(10, seed=seed))
        rng = generator(5)
        draws.append([sample.input_ids.tolist() for _ in range(3) for sample in buffer.sample_batch(50, rng)])
    assert draws[0] == draws[1]


def test_a_sample_longer_than_the_batch_comes_alone(make_sample):
    buffer = FeatureBuffer(max_tokens=1000)
    buffer.add(make_sample(500))
    assert [sample.num_tokens for sample in buffer.sample_batch(100, generator())] == [500]
    assert FeatureBuffer(max_tokens=10).sample_batch(100, generator()) == []


def test_small_batches_see_long_answers_too(make_sample):
    # Micro-steps are shorter than a long answer: it comes alone, in windows, and as often as its share says.
    buffer = FeatureBuffer(max_tokens=10_000, long_answer_fraction=0.5)
    for seed in range(16):
        buffer.add(make_sample(300 if seed < 4 else 20, step=0, seed=seed))
    buffer.start_step(1)
    rng = generator()
    batches = [buffer.sample_batch(64, rng) for _ in range(100)]
    assert all(batch for batch in batches)
    alone = sum(batch[0].num_tokens == 300 for batch in batches)
    assert 40 <= alone <= 80
    assert all(len(batch) == 1 for batch in batches if batch[0].num_tokens == 300)


def test_data_of_the_present_step_is_mixed_in(make_sample):
    buffer = FeatureBuffer(max_tokens=10_000, long_answer_fraction=0.5)
    for seed in range(8):
        buffer.add(make_sample(20, step=0, seed=seed))
    buffer.start_step(1)
    for seed in range(8):
        buffer.add(make_sample(20, step=1, seed=seed))
    batch = buffer.sample_batch(160, generator())
    assert {sample.step for sample in batch} == {0, 1}


@pytest.mark.parametrize("field", ["aux_hidden_states", "last_hidden_state"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rejects_what_is_not_finite(make_sample, field, value):
    buffer = FeatureBuffer(max_tokens=1000)
    sample = make_sample(10)
    getattr(sample, field)[3, 5] = value
    assert not buffer.add(sample)
    assert (len(buffer), buffer.num_rejected) == (0, 1)


def test_a_resumed_buffer_draws_the_same(make_sample, tmp_path):
    buffer = FeatureBuffer(max_tokens=1000)
    for step in (6, 7):
        buffer.start_step(step)
        for i in range(6):
            buffer.add(make_sample(10 + i, step=step, seed=10 * step + i))
        buffer.sample_batch(30, torch.Generator().manual_seed(step))
    torch.save(buffer.state_dict(), tmp_path / "buffer.pt")
    resumed = FeatureBuffer(max_tokens=1000)
    resumed.load_state_dict(torch.load(tmp_path / "buffer.pt", weights_only=True))
    assert (resumed.current_step, resumed.num_added, resumed.num_tokens) == (7, 12, buffer.num_tokens)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    for _ in range(5):
        drawn, drawn_again = (b.sample_batch(40, g) for b, g in zip((buffer, resumed), generators, strict=True))
        assert len(drawn) == len(drawn_again) > 0
        for sample, again in zip(drawn, drawn_again, strict=True):
            assert torch.equal(sample.aux_hidden_states, again.aux_hidden_states)
            assert (sample.step, sample.prompt_length) == (again.step, again.prompt_length)


def test_a_smaller_buffer_resumes_with_what_fits(make_sample):
    buffer = FeatureBuffer(max_tokens=1000)
    for i in range(4):
        buffer.add(make_sample(10, step=i, seed=i))
    resumed = FeatureBuffer(max_tokens=20)
    resumed.load_state_dict(buffer.state_dict())
    assert [sample.step for sample in resumed.samples] == [2, 3]


@pytest.mark.parametrize("arguments", [{"max_tokens": 0}, {"long_answer_fraction": 1.5}, {"max_age": 0}])
def test_bad_arguments_are_named(arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}="):
        FeatureBuffer(**{"max_tokens": 10} | arguments)


class TestRuns:
    def test_features_of_an_earlier_run_keep_their_age(self, make_sample):
        buffer = FeatureBuffer(max_tokens=1000, max_age=4)
        for step in range(96, 101):
            buffer.start_step(step)
            buffer.add(make_sample(10, step=step, seed=step))
        buffer.start_run()
        buffer.start_step(0)
        assert [sample.step for sample in buffer.samples] == [-4, -3, -2, -1]  # the first is too old by now
        buffer.start_step(2)
        assert [sample.step for sample in buffer.samples] == [-2, -1]

    def test_newcomers_of_a_new_run_are_kept(self, make_sample):
        buffer = FeatureBuffer(max_tokens=100, max_age=4)
        for step in range(96, 101):
            buffer.start_step(step)
            buffer.add(make_sample(20, step=step, seed=step))
        buffer.start_run()
        for step in range(4):
            buffer.start_step(step)
            assert all(buffer.add(make_sample(10, step=step, seed=i)) for i in range(4))

    def test_a_loaded_state_is_this_runs(self, make_sample):
        saved = FeatureBuffer(max_tokens=100)
        saved.start_step(7)
        saved.add(make_sample(10, step=7))
        buffer = FeatureBuffer(max_tokens=100)
        buffer.start_run()
        buffer.load_state_dict(saved.state_dict())
        buffer.start_step(8)
        assert [sample.step for sample in buffer.samples] == [7]
