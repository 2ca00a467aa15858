"""Makes tiles of attention fit into the shared memory of GPUs that no table was measured on."""

import torch

from models.kernels.gpu import gpu_of

_LEAST_KEYS = 16
"""Fewest keys of a tile: tensor cores multiply no fewer."""


def fitting_keys(
    keys: int,
    num_stages: int,
    *,
    key_bytes: int,
    rows: int,
    row_bytes: int,
    itemsize: int,
    device: torch.device,
) -> tuple[int, int]:
    """Returns the keys of a tile and the pipeline's stages, as many of a table's as fit.

    Hopper has what its tables say. Elsewhere keys are halved as long as no two stages of them fit
    beside the rows' weights, and beside the rows where tensor cores read these from shared memory.

    keys, num_stages: of the table.
    key_bytes: of all that a key has in a stage.
    rows: of queries.
    row_bytes: of a query.
    itemsize: bytes of a weight.
    """
    gpu = gpu_of(device)
    query_bytes = rows * row_bytes if gpu.reads_left_factors else 0
    least = min(2, num_stages)
    while True:
        others = query_bytes + rows * keys * itemsize
        stages = gpu.stages(num_stages, keys * key_bytes, others)
        if stages >= least or keys <= _LEAST_KEYS:
            return keys, stages
        keys //= 2
