"""Formats of fewer than 16 bits: dtypes, limits, and how many elements share a scale.

Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning"; Open Compute Project 2023,
"OCP Microscaling Formats (MX) Specification", sections 5.1 and 5.3.
"""

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""Largest finite FP8 value."""
BLOCK = 128
"""Rows and columns of an FP8 weight that share a scale, and features of one token's activations."""
SMALLEST_AMAX = 1e-10
"""Least magnitude that a scale of activations is made from, so that zeros have a scale."""
SMALLEST_INDEX_AMAX = 1e-4
"""Least magnitude that a scale of an indexer's queries and keys is made from."""

MXFP4 = torch.uint8
"""Dtype of packed MXFP4 weights, two to a byte, and of their scales."""
MXFP4_RUN = 32
"""Elements of a row that share an MXFP4 scale; 16 bytes."""
NVFP4_RUN = 16
"""Elements of a row that share an NVFP4 scale."""
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1_MAGNITUDES, *(-value for value in _E2M1_MAGNITUDES))
"""Values of a 4-bit float, by its bits."""
E8M0 = torch.float8_e8m0fnu
"""Dtype that reads an MXFP4 scale as the power of two that it is."""
