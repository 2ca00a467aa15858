"""Attention to compressed keys: addresses of rows, completed entries, and pieces of a step."""

import pytest
import torch

from models.loading.loader import load_model
from models.operands.row_pages import RowPages
from models.ops.attention.compressed_entries import completed_entries
from tests.support.paged_runner import PagedRunner
from tests.support.random_checkpoints import write_checkpoint

TOKENS = [5, 17, 3, 44, 2, 9, 9, 31, 60, 7, 8, 1, 90, 4, 4, 61, 18, 20, 33, 2, 71]


@pytest.mark.parametrize("rate", [1, 3, 4, 7, 16, 50])
@pytest.mark.parametrize("span", [1, 4])
def test_no_two_rows_of_a_sequence_share_a_place(rate, span):
    block_size, num_blocks = 4, 32
    num_rows = -(-block_size * span // rate)
    tables = torch.arange(1, 1 + num_blocks).repeat_interleave(span)[None, :num_blocks].int()
    pages = RowPages(
        rows=torch.zeros(1 + num_blocks, num_rows, 1),
        rate=rate,
        block_tokens=block_size * span,
        block_tables=tables,
        table_tokens=block_size,
    )
    numbers = torch.arange(pages.num_rows)
    requests, values = torch.zeros_like(numbers), 1.0 + numbers[:, None]
    pages.write(requests, numbers, values, torch.ones_like(numbers).bool())
    assert torch.equal(pages.of(requests, numbers), values)
    assert not pages.rows[0].any()


def test_rows_that_are_none_or_of_dummy_requests_are_not_written():
    pages = RowPages(
        rows=torch.zeros(3, 4, 2), rate=1, block_tokens=4, table_tokens=4,
        block_tables=torch.tensor([[2], [0]], dtype=torch.int32),
    )  # fmt: skip
    requests, numbers = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    are = torch.tensor([True, False, True, False])
    pages.write(requests, numbers, torch.ones(4, 2), are)
    assert pages.rows.sum() == 2
    assert pages.rows[2, 0].tolist() == [1, 1]


@pytest.mark.parametrize("rate", [1, 3, 4, 10])
def test_entries_are_completed_by_their_last_token(rate):
    spans = [range(7, 8), range(29), range(3, 3), range(8, 17), range(11, 12)]
    starts = torch.tensor([0, *(len(span) for span in spans)]).cumsum(0)
    positions = torch.tensor([position for span in spans for position in span])
    requests, numbers, are = completed_entries(starts, positions, rate)
    found = list(zip(requests[are].tolist(), numbers[are].tolist(), strict=True))
    assert found == [
        (request, position // rate)
        for request, span in enumerate(spans)
        for position in span
        if position % rate == rate - 1
    ]


def test_pieces_of_a_step_do_not_depend_on_their_size(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, "deepseek_v4")
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)

    def logits():
        runner = PagedRunner(model)
        return runner.run(runner.add(TOKENS), 13)

    expected = logits()
    monkeypatch.setattr("models.ops.attention.compressed_attention.MOST_GATHERED", 1000)
    torch.testing.assert_close(logits(), expected, rtol=1e-5, atol=1e-5)
