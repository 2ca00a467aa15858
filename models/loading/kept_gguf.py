"""Reads GGUF's integers into the form in which products take them, where that is exact."""

from functools import partial

import torch

from models.layers.quantization import PackedKind, Packing
from models.loading.gguf_blocks import block_scales, integers_4
from models.loading.gguf_code import GgufCode
from models.loading.kept_packed import KeptPart, KeptWeight
from models.operands.packed_weights import pack, to_kernel_order
from models.quantization.gguf import GROUP, KINDS

_STRIP_BLOCKS = 2**20


def kept_gguf(stored: torch.Tensor, code: GgufCode) -> KeptWeight | None:
    """Returns a matrix as products take it; None if its type or a scale would not be exact.

    Products take scales of bfloat16, and files have float16, which is finer. So a tensor is kept
    if all its scales have 8 significant bits. All are read until one has more.

    stored: [N, bytes of a row] uint8.
    """
    if code.type.name not in KINDS or len(code.shape) != 2 or not _has_exact_scales(stored, code):
        return None
    kind: PackedKind = "int4" if code.type.name == "Q4_0" else "int8"
    num_rows, num_columns = code.shape
    weight = num_rows, num_columns * (4 if kind == "int4" else 8) // 8
    groups = num_rows, num_columns // GROUP
    params = {
        "weight": KeptPart((stored,), partial(_integers, code=code), weight),
        "weight_scale": KeptPart((stored,), partial(_scales, code=code), groups),
    }
    return KeptWeight(Packing(kind=kind, group=GROUP), params)


def _has_exact_scales(stored: torch.Tensor, code: GgufCode) -> bool:
    blocks = stored.reshape(-1, code.type.num_bytes)
    for first in range(0, len(blocks), _STRIP_BLOCKS):
        scales = block_scales(blocks[first : first + _STRIP_BLOCKS]).float()
        if not torch.equal(scales.to(torch.bfloat16).float(), scales):
            return False
    return True


def _integers(stored: torch.Tensor, *, code: GgufCode) -> torch.Tensor:
    blocks = code.in_order(stored).reshape(-1, code.type.num_bytes)
    if code.type.name == "Q4_0":
        return pack(integers_4(blocks, 2).view(code.shape))
    integers = blocks[:, 2:].contiguous().view(torch.int8).view(code.shape)
    return to_kernel_order(integers)


def _scales(stored: torch.Tensor, *, code: GgufCode) -> torch.Tensor:
    blocks = code.in_order(stored).reshape(-1, code.type.num_bytes)
    return block_scales(blocks).view(code.shape[0], -1)
