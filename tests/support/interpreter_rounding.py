"""Mends conversions of floats in Triton's interpreter."""

import torch
from triton.language import bfloat16, float8e4nv, float32
from triton.runtime import interpreter

_convert = interpreter._convert_float


def round_exactly() -> None:
    """Rounds float32 as a GPU does.

    The interpreter loses the carry of a mantissa to float8e4nv, and cuts off to bfloat16.
    """
    interpreter._convert_float = _converted


def _converted(values, input_type, output_type, rounding_mode):
    if input_type != float32 or output_type not in (float8e4nv, bfloat16):
        return _convert(values, input_type, output_type, rounding_mode)
    exact = torch.from_numpy(values.copy())
    if output_type == bfloat16:
        return exact.to(torch.bfloat16).view(torch.uint16).numpy()
    return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
