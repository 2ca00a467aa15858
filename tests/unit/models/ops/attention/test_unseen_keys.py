import torch

from models.ops.attention.unseen_keys import clear_unseen


def test_content_after_the_last_key_is_cleared_and_nothing_else():
    gathered = torch.ones(3, 8, 2, 5)
    gathered[0, 3:4] = torch.nan  # its last key is the third
    gathered[1, 6:] = torch.inf
    seen = torch.tensor([3, 6, 8])[:, None] > torch.arange(8)
    clear_unseen(gathered, seen[:, None, None], block_size=4)
    expected = torch.ones(3, 8, 2, 5)
    expected[0, 3] = expected[1, 6:] = 0
    assert torch.equal(gathered, expected)


def test_a_chunks_last_query_gives_the_end_of_its_keys():
    gathered = torch.full((1, 4, 3), torch.nan)
    gathered[:, :3] = 1
    mask = torch.ones(2, 4, dtype=torch.bool).tril(diagonal=1)
    clear_unseen(gathered, mask[None, None], block_size=4)
    assert gathered.sum() == 9
