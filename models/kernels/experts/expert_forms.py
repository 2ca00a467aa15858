"""Chooses the kernels for a batch of experts on the host, from shapes alone.

Each form is a set of kernels to build; warm-up asks which steps need them.
"""

import torch

from models.kernels.gpu import is_hopper
from models.kernels.tuning.hopper import FORMS_OF_4_BITS, FORMS_OF_8_BITS
from models.kernels.tuning.tiles import Forms

MOST_PAIRS = 64
"""Most pairs of a token and an expert that are computed alone; with more, tokens share experts."""
TILE_ROWS = (16, 32, 64, 128)
"""Heights of the tiles that experts' rows are cut into, for most formats."""


COMMON = Forms(experts_per_pair=2, heights=tuple((rows, rows // 2) for rows in TILE_ROWS))
ON_CORES = FORMS_OF_4_BITS
"""Tiles of models.kernels.experts.packed.packed_experts."""
OF_8_BITS = FORMS_OF_8_BITS
"""Tiles of models.kernels.experts.fp8.fp8_experts."""


def takes_cores(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether experts of 4 bits run moe.packed.packed_experts on a GPU."""
    return dtype == torch.bfloat16 and is_hopper(device)


def are_few(num_pairs: int, num_experts: int, top_k: int, forms: Forms = COMMON) -> bool:
    """Returns whether each pair is computed alone, as few experts are chosen twice.

    Sorting the pairs by expert would cost more than it saves.
    """
    return num_pairs <= _most_few(num_experts, top_k, forms)


def tile_rows(num_pairs: int, num_experts: int, forms: Forms = COMMON) -> int:
    """Returns the height of tiles for an expert's average rows.

    An expert with more rows has its weights read once per tile.
    """
    heights = forms.heights
    fitting = (rows for rows, most in heights if num_pairs <= most * num_experts)
    return next(fitting, heights[-1][0])


def first_tokens_of_each_form(num_experts: int, top_k: int, *others: Forms) -> list[int]:
    """Returns the smallest number of tokens that takes each form, in rising order.

    others: forms besides COMMON.
    """
    last_pairs = {
        pairs
        for forms in (COMMON, *others)
        for pairs in (
            _most_few(num_experts, top_k, forms),
            *(most * num_experts for _, most in forms.heights[:-1]),
        )
    }
    return sorted({1, *(pairs // top_k + 1 for pairs in last_pairs)})


def _most_few(num_experts: int, top_k: int, forms: Forms) -> int:
    return min(MOST_PAIRS, max(num_experts // forms.experts_per_pair, top_k))
