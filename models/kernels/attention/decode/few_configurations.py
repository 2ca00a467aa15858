"""Tiles of few_queries, in tables."""

from models.kernels.attention.configurations import Tiles

_NARROW = Tiles(
    rows=16, keys=32, num_warps=1, num_stages=5, num_programs=1056, least_part=128,
    keys_as_rows=True,
)  # fmt: skip
_WIDE = Tiles(rows=64, keys=64, num_warps=4, num_stages=5, num_programs=264, least_part=128)
"""For chunks of few queries after an FP8 cache: see few_query_tiles.

8 requests of 3 tokens after 16,000 took 98.5 us in narrow tiles, in wide ones 194, with half as
many narrow programs 114; 32 of 5 after 4000, two narrow tiles each, 155 and 199; one of 5 after
1000 24.7 and 15.8, after 16,000 41.6 and 36.5. Narrow ones of 32 rows took 325 us instead of 342
for 40 of 5 after 8000, but 28.7 for one after 1000 and 94 for 4 of 3 after 16,000. Wide ones with 3
or 7 stages, 128 keys or registers for three programs at a time are no better (H200, 32 heads, 8 kv
heads of 128, 2026-11).
"""

_NARROW_REQUESTS = 5
_NARROW_ROWS = 32
_NARROW_GROUP = 8
"""Fewest requests, most rows and largest group with which more rows than 16 take narrow tiles.

In such groups the warm-up step of two short prompts builds them."""

MAX_FEW_ROWS = max(2 * tiles.num_programs * tiles.rows for tiles in (_NARROW, _WIDE))
"""Rows of results of few_queries that the workspace has room for: each program has a part of two
shared tiles at most."""


def few_query_tiles(num_rows: int, *, group: int, num_requests: int) -> Tiles:
    """Returns the tiles of few_queries; num_rows: most of a request and kv head."""
    has_two = num_requests >= _NARROW_REQUESTS and group <= _NARROW_GROUP
    is_narrow = num_rows <= (_NARROW_ROWS if has_two else _NARROW.rows)
    return _NARROW if is_narrow else _WIDE
