"""Chooses the kernels for a batch of experts on the host, from shapes alone.

Each form is a set of kernels to build; warm-up asks which steps need them.
"""

MOST_PAIRS = 64
"""Most pairs of a token and an expert that are computed alone; with more, tokens share experts."""
TILE_ROWS = (16, 32, 64, 128)
"""Heights of the tiles that experts' rows are cut into."""


def are_few(num_pairs: int, num_experts: int, top_k: int) -> bool:
    """Returns whether each pair is computed alone, as few experts are chosen twice.

    Sorting the pairs by expert would cost more than it saves.
    """
    return num_pairs <= _most_few(num_experts, top_k)


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Returns the height of tiles: twice an expert's average rows, rounded up.

    An expert with more rows has its weights read once per tile.
    """
    return next((rows for rows in TILE_ROWS if 2 * num_pairs <= rows * num_experts), TILE_ROWS[-1])


def first_tokens_of_each_form(num_experts: int, top_k: int) -> list[int]:
    """Returns the smallest number of tokens that takes each form, in rising order."""
    last_of_tiles = (rows * num_experts // 2 for rows in TILE_ROWS[:-1])
    last_pairs = _most_few(num_experts, top_k), *last_of_tiles
    return sorted({1, *(pairs // top_k + 1 for pairs in last_pairs)})


def _most_few(num_experts: int, top_k: int) -> int:
    return min(MOST_PAIRS, max(num_experts // 2, top_k))
