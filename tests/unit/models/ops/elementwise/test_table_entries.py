import torch

from models.ops.elementwise.table_entries import write_entries


def test_entries_are_written_where_they_belong_and_nowhere_else():
    table = torch.zeros(3, 4, dtype=torch.int32)
    write_entries(table, torch.tensor([[1, 11, 4], [7, 8, 9]], dtype=torch.int32))
    assert table.tolist() == [[0, 7, 0, 0], [9, 0, 0, 0], [0, 0, 0, 8]]
