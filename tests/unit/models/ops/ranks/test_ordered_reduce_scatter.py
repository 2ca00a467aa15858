import torch

from models.ops.ranks.ordered_reduce_scatter import ordered_reduce_scatter
from models.parallel.collectives import without_other_ranks
from tests.support.gloo_ranks import run_ranks

PROGRAM = """
from models.ops.ranks.ordered_reduce_scatter import ordered_reduce_scatter

draws = torch.Generator().manual_seed(rank)
x = torch.randn(size * 5, 7, generator=draws).to(torch.bfloat16)
results = [x, ordered_reduce_scatter(x, "ranks", size)]
"""


def test_each_rank_gets_its_rows_added_in_rank_order(tmp_path):
    outcomes = run_ranks(PROGRAM, 3, tmp_path)
    parts = [x.view(3, 5, 7).float() for x, _ in outcomes]
    expected = (parts[0] + parts[1] + parts[2]).bfloat16()
    for rank, (_, share) in enumerate(outcomes):
        assert torch.equal(share, expected[rank])


def test_it_is_an_operator_with_a_fake():
    x = torch.ones(6, 3)
    with without_other_ranks():
        assert torch.equal(ordered_reduce_scatter(x, "nobody", 2), 2 * x[:3])
        torch.library.opcheck(torch.ops.octavo.ordered_reduce_scatter.default, (x, "nobody", 2))
