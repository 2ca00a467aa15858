"""Mends the conversion to 8-bit floats in Triton's interpreter."""

import torch
from triton.language import float8e4nv, float32
from triton.runtime import interpreter

_convert = interpreter._convert_float


def round_exactly() -> None:
    """Rounds float32 to float8e4nv as a GPU does; the interpreter loses the carry of a mantissa."""
    interpreter._convert_float = _converted


def _converted(values, input_type, output_type, rounding_mode):
    if input_type != float32 or output_type != float8e4nv:
        return _convert(values, input_type, output_type, rounding_mode)
    return torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
