"""Whole blocks go to rows and back in Triton's interpreter."""

from tests.support.programs import run_interpreted

PROGRAM = """
import torch
from models.kernels.elementwise.block_parts import BlockParts, copy_block_parts

sizes = (5, 1030, 1, 2048)
for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
    parts = [torch.randint(0, 100, (7, size)).to(dtype) for size in sizes]
    table = BlockParts.of(parts)
    block_ids = torch.tensor([6, 0, 3])
    rows = torch.zeros(5, sum(sizes), dtype=dtype)
    copy_block_parts(table, block_ids, rows[:3], writes=False)
    assert torch.equal(rows[:3], torch.cat([part[block_ids] for part in parts], 1))
    assert not rows[3:].any()
    expected = [part.clone() for part in parts]
    targets = torch.tensor([1, 2, 5])
    for part in expected:
        part[targets] = part[block_ids]
    copy_block_parts(table, targets, rows[:3], writes=True)
    for part, content in zip(parts, expected):
        assert torch.equal(part, content)
"""


def test_blocks_are_copied_to_rows_and_back():
    run_interpreted(PROGRAM)
