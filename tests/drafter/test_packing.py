import torch

from tlt_trl.drafter.packing import crop, pack


def test_documents_positions_and_rows(make_sample):
    batch = pack([make_sample(5, prompt_length=2), make_sample(4, prompt_length=1)])
    assert batch.document_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    # tokens           p p a a a | p a a a
    # predicts (t+2)   a a a . . | a a . .
    assert batch.rows(0).tolist() == [0, 1, 2, 5, 6]
    assert batch.rows(1).tolist() == [0, 1, 5]
    assert batch.rows(2).tolist() == [0]
    assert batch.rows(3).tolist() == []
    assert batch.loss_mask(1).nonzero().flatten().tolist() == [0, 1, 5]


def test_only_answer_tokens_of_the_same_document_are_predicted(make_sample):
    samples = [make_sample(n, prompt_length=p) for n, p in [(9, 4), (3, 2), (2, 1), (12, 11), (7, 0)]]
    batch = pack(samples)
    for step in range(4):
        for row in batch.rows(step).tolist():
            label = row + 2 + step
            assert batch.document_ids[label] == batch.document_ids[row]
            document = int(batch.document_ids[row])
            assert batch.position_ids[label] >= samples[document].prompt_length


def test_crop_keeps_a_window_with_answer_tokens(make_sample):
    sample = make_sample(50, prompt_length=30)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        window = crop(sample, 10, generator)
        start = 30 - window.prompt_length if window.prompt_length else None
        assert window.num_tokens == 10
        assert len(pack([window]).rows(0)) > 0
        if start is not None:
            assert torch.equal(window.input_ids, sample.input_ids[start : start + 10])
            assert torch.equal(window.aux_hidden_states, sample.aux_hidden_states[start : start + 10])
    assert crop(sample, 50, generator) is sample
