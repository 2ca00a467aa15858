import torch

from models.ops.communication.gather_rows import gather_rows, reduce_scatter
from models.parallel.collectives import without_other_ranks


def test_collectives_without_other_ranks_keep_their_shapes():
    x = torch.arange(6.0).view(2, 3)
    with without_other_ranks():
        gathered = gather_rows(x, "nobody", 3)
        assert torch.equal(gathered, x.repeat(3, 1))
        assert torch.equal(reduce_scatter(gathered, "nobody", 3), x)


def test_collectives_are_operators_with_fakes():
    x = torch.ones(6, 3)
    with without_other_ranks():
        torch.library.opcheck(torch.ops.octavo.gather_rows.default, (x, "nobody", 2))
        torch.library.opcheck(torch.ops.octavo.reduce_scatter.default, (x, "nobody", 2))
