"""Finds out how an FP8 weight is scaled."""

from collections.abc import Mapping

from models.loading.checkpoint import CheckpointTensor
from models.number_formats import BLOCK
from models.quantization.config import QuantizationConfig, WeightScheme

SCALE = "_scale"
"""End of the name of a weight's scale."""


def fp8_scheme(
    name: str, stored: Mapping[str, CheckpointTensor], quantization: QuantizationConfig
) -> WeightScheme | None:
    """Returns how a stored FP8 weight is scaled: as config.json says, or as its scale shows.

    Tools that quantise an FP8 checkpoint further keep layers in FP8 that they do not describe
    (Quark, file by file). None: the scale has another shape, or is missing.
    """
    scheme = quantization.stored_scheme(stored[name].module, "fp8")
    scale = stored.get(name + SCALE)
    if scheme is not None or scale is None:
        return scheme
    shape = stored[name].values.shape
    if scale.values.numel() == 1 or tuple(scale.values.shape) in ((shape[0],), (shape[0], 1)):
        return WeightScheme(kind="fp8")
    if tuple(scale.values.shape) == tuple(-(-size // BLOCK) for size in shape):
        return WeightScheme(kind="fp8", block_size=(BLOCK, BLOCK))
    return None
