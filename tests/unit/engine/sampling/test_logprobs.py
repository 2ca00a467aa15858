import torch

from services.engine.sampling.logprobs import compute_logprobs


def test_logprobs_are_log_softmax_of_chosen_and_best_tokens():
    logits = 5 * torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([0, 29, 7, 7])
    result = compute_logprobs(logits, chosen, 3)
    truth = logits.log_softmax(-1)
    torch.testing.assert_close(result.chosen, truth[torch.arange(4), chosen])
    best = truth.topk(3)
    assert torch.equal(result.top_token_ids, best.indices)
    torch.testing.assert_close(result.top, best.values)


def test_no_top_tokens_leave_the_chosen_one():
    result = compute_logprobs(torch.zeros(2, 4), torch.tensor([1, 2]), 0)
    assert result.top.shape == (2, 0)
    torch.testing.assert_close(result.chosen, torch.full((2,), 0.25).log())


def test_more_top_tokens_than_the_vocabulary_are_all_of_it():
    result = compute_logprobs(torch.zeros(1, 4), torch.tensor([0]), 20)
    assert sorted(result.top_token_ids[0].tolist()) == [0, 1, 2, 3]
