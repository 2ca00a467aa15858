"""Attention to shared prefixes in Triton's interpreter, against the reference without sharing."""

import pytest

from tests.support.programs import run_interpreted

PROGRAM = """
from dataclasses import replace
import torch
torch.set_num_threads(1)
from models.kernels.attention import attention
from models.kernels.attention.decode import prefix_attention
from tests.support.attention_case import Heads, make_case
from tests.support.prefix_case import with_shared
from tests.support.tolerances import assert_rows_close

# Most programs of a GPU would find no work; these have several parts each.
gpus_tiles = prefix_attention.prefix_tiles
prefix_attention.prefix_tiles = lambda *facts: replace(
    gpus_tiles(*facts), num_programs=(6, 6, 1)[number % 3]
)
CASES = [
    # Two prefixes, requests without one and an absent request.
    (([1] * 7, [90, 70, 5, 0, 101, 99, 66]), (6, 2, 12), [([0, 1, 6], 4), ([5, 4], 6)], {}),
    # More requests than a tile has, dealt parts and several parts of the prefix.
    (([1] * 19, [609 + 3 * i for i in range(19)]), (4, 1, 16), [(list(range(18)), 38)], {}),
    # Prefixes inside of others.
    (([1] * 9, [600, 640, 300, 700, 90, 610, 605, 70, 80]), (4, 2, 16),
     [([0, 1, 2, 3, 5, 6, 7], 4), ([1, 2, 3, 0], 10), ([8, 4], 3), ([3, 1, 0], 36)], {}),
    # Heads of two programs, some of which do not exist.
    (([1] * 4, [70, 65, 80, 95]), (6, 1, 16), [([3, 0, 1, 2], 4)], {"has_sinks": True}),
    (([1] * 5, [70, 65, 80, 95, 3]), (2, 2, 68), [([1, 3, 0], 3)], {"soft_cap": 1.5}),
    # Single tokens of a step with chunks.
    (([1, 7, 1, 1, 20, 1], [70, 7, 65, 300, 50, 9]), (6, 2, 12), [([0, 2, 3], 4)], {}),
    (([1, 7, 1, 1], [70, 90, 65, 300]), (4, 2, 64), [([0, 3], 4)],
     {"has_sinks": True, "has_rotation": False, "soft_cap": 0.7}),
    (([1] * 4, [70, 65, 80, 95]), (4, 2, 16), [([0, 1, 2, 3], 12)],
     {"block_size": 5, "has_norm": False}),
    # Drafts, of a request that has fewer, beside a single token and a chunk.
    (([3, 3, 2, 3, 1, 7], [90, 70, 101, 99, 66, 80]), (6, 2, 12), [([0, 3, 4, 1, 2], 3)], {}),
    # More queries than a tile has, prefixes inside of others, and several parts of own keys.
    (([5] * 9, [609 + 3 * i for i in range(8)] + [1900]), (4, 1, 16),
     [(list(range(9)), 8), ([2, 8, 5, 1], 37)], {"has_sinks": True}),
    (([2, 2, 2, 0, 2], [70, 80, 99, 0, 7]), (32, 1, 16), [([2, 0, 1], 4)], {"soft_cap": 1.5}),
    (([20] * 4, [90, 100, 190, 95]), (4, 1, 16), [([3, 0, 1, 2], 4)], {"has_rotation": False}),
    # Whose layers have a window, and read no prefix.
    (([1] * 4, [70, 65, 80, 95]), (4, 2, 16), [([0, 1, 2, 3], 4)], {"sliding_window": 20}),
]
for number, (batch, heads, prefixes, options) in enumerate(CASES):
    heads = Heads(num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2])
    dtype = (torch.float32, torch.float16)[number % 2]
    has_fp8 = {"16-bit": False, "fp8-cache": True, "in-turn": number % 4 in (1, 2)}[CACHE]
    case = make_case(*batch, heads, dtype=dtype, has_fp8_cache=has_fp8, **options)
    case = with_shared(case, prefixes)
    exact = case.exact()
    case.leave_window()
    output = torch.full(case.q.shape, torch.nan, dtype=dtype)
    attention.attend(
        case.q, case.k, case.v, output, case.cache, case.metadata, case.transform,
        case.sliding_window, case.sinks, case.q.shape[2] ** -0.5, case.soft_cap,
    )
    live = case.metadata.seq_lens.repeat_interleave(case.metadata.query_start_loc.diff()) > 0
    expected = case.exact_reading() if has_fp8 else exact
    assert_rows_close(output[live], expected.run()[live])
    assert output[~live].count_nonzero() == 0
    partials = case.metadata.workspace.prefix_lse
    assert bool(partials.isfinite().any()) == (case.sliding_window is None)
"""


@pytest.mark.parametrize("cache", ["in-turn", "16-bit", "fp8-cache"])
def test_requests_that_share_keys_get_what_each_gets_by_itself(cache):
    run_interpreted(f"CACHE = {cache!r}\n{PROGRAM}")
