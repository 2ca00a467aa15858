"""A prefix that more requests share than fit a plan is read once for some of them."""

from unittest import mock

from models.cudagraph_mode import CUDAGraphMode
from services.engine.batch import read_int32
from services.engine.scheduler import shared_prefixes
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint

EAGER = compilation_config(cudagraph_mode=CUDAGraphMode.NONE)
SYSTEM = [5, 17, 3, 44, 2, 9, 31, 60, 7, 8, 1, 90]
BRANCH = [*SYSTEM, 11, 12, 13, 14, 15, 16, 21, 22]
PROMPTS = [*([*SYSTEM, 30 + i] for i in range(5)), *([*BRANCH, 40 + i] for i in range(5))]


def test_tokens_are_those_without_sharing(tmp_path):
    write_checkpoint(tmp_path, "qwen3")

    def run(shared_prefix_tokens):
        engine = GraphEngine(
            tmp_path, EAGER, shared_prefix_tokens=shared_prefix_tokens, num_blocks=300,
            max_num_seqs=11, lookup_sizes=(1, 3), num_speculative_tokens=3,
        )  # fmt: skip
        tokens = engine.run([SYSTEM, BRANCH], 2) + engine.run(PROMPTS, 20)
        plans = (order.attn_metadata.shared_prefixes.counts for order, _ in engine.steps)
        return tokens, [read_int32(counts).tolist() for counts in plans]

    expected, _ = run(0)
    # Queries of four requests fill a tile.
    with mock.patch.object(shared_prefixes, "MOST_TILES", 3):
        tokens, plans = run(4)
    assert tokens == expected
    # All requests with the longer prefix share it; as many others as fit share the shorter one.
    assert [4, 5] in plans
