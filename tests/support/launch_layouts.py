"""Checks on a CPU that kernels find the elements of the tensors that they are launched with.

Torch's operators follow strides, so they hide a tensor with the wrong ones; a kernel reads memory
after it. A kernel's tensor is contiguous, or its launch passes the strides, or they follow from its
shape as those of `empty_token_scales` do.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from triton.runtime import JITFunction

from models.kernels.launching.kernel_builds import kernel_functions
from models.operands.token_scales import empty_token_scales

TOKEN_SCALES = {
    ("_rms_norm_kernel", "scale_ptr"),
    ("_rounded_kernel", "scale_ptr"),
    ("_narrow_fp8_kernel", "output_scale_ptr"),
    ("_wide_fp8_kernel", "output_scale_ptr"),
}
"""Kernels' parameters with the layout of empty_token_scales."""
ANY_STRIDES = {("_quantize_kernel", "scale_ptr"), ("_block_linear_kernel", "x_scale_ptr")}
"""Kernels' parameters all of whose strides a launch passes."""


class UnreadableTensorError(Exception):
    """A launch has a tensor whose elements its kernel does not find."""


@contextmanager
def layouts_checked() -> Iterator[dict[str, int]]:
    """Checks the launches that Triton is asked for; yields how many there were of each kernel.

    Raises:
        UnreadableTensorError: at a launch. Where the copy engine is to read, Triton's descriptors
            raise an AssertionError instead.
    """
    counts: dict[str, int] = {}
    runs = {kind: kind.run for kind in {type(each) for each in kernel_functions()}}

    def run(function: JITFunction, *args, **options):
        name = function.fn.__name__
        counts[name] = counts.get(name, 0) + 1
        passed = {each for each in (*args, *options.values()) if isinstance(each, int)}
        for parameter, value in zip(function.arg_names, args, strict=False):
            if isinstance(value, torch.Tensor) and not _is_readable(name, parameter, value, passed):
                raise UnreadableTensorError(
                    f"{name}'s {parameter} is {tuple(value.shape)} with strides {value.stride()}, "
                    f"and the launch passes {sorted(passed)}"
                )
        return runs[type(function)](function, *args, **options)

    for kind in runs:
        kind.run = run
    try:
        yield counts
    finally:
        for kind, original in runs.items():
            kind.run = original


def _is_readable(kernel: str, parameter: str, tensor: torch.Tensor, passed: set[int]) -> bool:
    """Returns whether a kernel finds a tensor's elements, given the integers of its launch."""
    if tensor.is_contiguous():
        return True
    if (kernel, parameter) in TOKEN_SCALES:
        return tensor.stride() == empty_token_scales(*tensor.shape, tensor.device).stride()
    if (kernel, parameter) in ANY_STRIDES:
        return passed >= set(tensor.stride())
    return (
        tensor.dim() > 1
        and tensor.stride(-1) == 1
        and all(_is_passed(tensor, dim, passed) for dim in range(tensor.dim() - 1))
    )


def _is_passed(tensor: torch.Tensor, dim: int, passed: set[int]) -> bool:
    """Returns whether a launch passes a stride, in elements or in rows of the last dimension."""
    stride, row = tensor.stride(dim), tensor.shape[-1]
    if tensor.shape[dim] == 1 or stride == tensor.shape[dim + 1 :].numel():
        return True
    return stride > 0 and (stride in passed or (stride % row == 0 and stride // row in passed))
