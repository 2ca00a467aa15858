"""Reads packed weights into the form in which products take them, without multiplying them out.

Each stored tensor fills one parameter of a linear layer; models.operands.packed_weights has the
forms. Experts have scales and zero points in one parameter, as models.ops.experts.expert_formats
says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from models.layers.quantization import FLOAT_GROUPS, PackedKind, Packing
from models.layers.weight import LoadsWeights, ShardId
from models.loading.integers import IntegerFormat, stored_q, stored_scale, stored_zero
from models.number_formats import E8M0
from models.operands.packed_weights import pack, signed, to_kernel_order
from models.operands.run_scales import integer_words

SCALE_LIMIT = 2.0**64
"""Products of 4-bit floats overflow from this scale on."""


@dataclass(frozen=True, slots=True)
class KeptPart:
    """One parameter's values."""

    parts: tuple[torch.Tensor, ...]
    """Inputs of `decode`, as stored."""
    decode: Callable[..., torch.Tensor]
    shape: tuple[int, ...]
    """Of the decoded values, in elements of the parameter."""


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """A weight of 4 bits, or of integers of 8, by parameters of its layer."""

    packing: Packing
    params: Mapping[str, KeptPart]
    order: torch.Tensor | None = None
    """The group of each column, [K], unless equal runs have one each."""

    def of_expert(self, columns: int) -> dict[str, KeptPart]:
        """Returns the values of an expert's matrix, whose scales are in one parameter.

        columns: how many of a row share an entry of the scales.
        """
        scale = self._words(columns) if self.packing.is_integer else self.params["weight_scale"]
        return {"weight": self.params["weight"], "weight_scale": scale}

    def _words(self, columns: int) -> KeptPart:
        """Returns scales and zero points of integers; decoded are the two bfloat16 of each word."""
        names = [name for name in ("weight_scale", "weight_zero") if name in self.params]
        each = [self.params[name] for name in names]
        num_rows, num_bytes = self.params["weight"].shape
        num_words = 2 * num_bytes // columns
        decodes = [part.decode for part in each]
        return KeptPart(
            tuple(tensor for part in each for tensor in part.parts),
            partial(_words, decodes=decodes, num_words=num_words),
            (num_rows, num_words),
        )

    def shares_layer(self, other: "KeptWeight") -> bool:
        """Returns whether one layer can keep both weights, one above the other."""
        if self.packing != other.packing:
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)


def kept_integers(
    parts: Mapping[str, torch.Tensor], stored: IntegerFormat, group: int | None
) -> KeptWeight | None:
    """Returns integers as products take them; None if no product does.

    parts: the stored tensors by their meanings: q, scale, and maybe zero and order.
    group: columns that share a scale; None: a whole row.
    """
    num_rows, num_columns = stored.shape
    order = _real_order(parts.get("order"), num_columns, group)
    if order is not None and not _has_equal_groups(order, num_columns, group):
        return None
    num_bytes = num_columns * stored.num_bits // 8
    groups = num_rows, num_columns // (group or num_columns)
    q = (parts["q"],) if order is None else (parts["q"], order)
    params = {
        "weight": KeptPart(q, partial(_ordered_q, stored=stored), (num_rows, num_bytes)),
        "weight_scale": KeptPart((parts["scale"],), partial(_scale, stored, groups), groups),
    }
    if "zero" in parts:
        params["weight_zero"] = KeptPart((parts["zero"],), partial(_zero, stored, groups), groups)
    if order is not None:
        params["weight_order"] = KeptPart((order,), _columns_by_group, (num_columns,))
    packing = Packing(
        kind="int8" if stored.num_bits == 8 else "int4",
        group=group,
        has_zeros="zero" in parts,
        has_order=order is not None,
    )
    return KeptWeight(packing, params, order)


def kept_floats(
    packed: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor | None, *, is_inverse: bool
) -> KeptWeight:
    """Returns MXFP4, or with an outer scale NVFP4, as products take it.

    Arguments are those of dequantize_fp4.
    """
    weight = KeptPart((packed,), partial(to_kernel_order, is_float=True), tuple(packed.shape))
    if outer is None:
        scales = KeptPart((scale,), _exponents, tuple(scale.shape))
    else:
        decode = partial(_products_of_scales, is_inverse=is_inverse)
        scales = KeptPart((scale, outer), decode, tuple(scale.shape))
    kind: PackedKind = "mxfp4" if outer is None else "nvfp4"
    packing = Packing(kind=kind, group=FLOAT_GROUPS[kind])
    return KeptWeight(packing, {"weight": weight, "weight_scale": scales})


class KeepsBits:
    """Fills a parameter of integers with the bits of a tensor that is checked as numbers."""

    def __init__(self, layer: LoadsWeights) -> None:
        self.layer = layer

    def weight_loader(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: ShardId) -> None:
        """Copies this rank's share."""
        self.layer.weight_loader(param, loaded.view(param.dtype), shard_id)


def _real_order(
    order: torch.Tensor | None, num_columns: int, group: int | None
) -> torch.Tensor | None:
    """Returns the group of each column; None if these are equal runs in order."""
    if order is None or group is None:
        return None
    runs = torch.arange(num_columns, device=order.device) // group
    return None if torch.equal(order.long(), runs) else order


def _has_equal_groups(order: torch.Tensor, num_columns: int, group: int | None) -> bool:
    size = group or num_columns
    counts = torch.bincount(order.long(), minlength=num_columns // size)
    return bool((counts == size).all())


def _columns_by_group(order: torch.Tensor) -> torch.Tensor:
    """Returns the columns of the first group, then those of the second, and so on, [K] int32."""
    return order.argsort(stable=True).int()


def _ordered_q(
    q: torch.Tensor, order: torch.Tensor | None = None, *, stored: IntegerFormat
) -> torch.Tensor:
    values = stored_q(q, stored)
    if order is not None:
        values = values[:, order.argsort(stable=True)]
    return pack(values, num_bits=stored.num_bits)


def _scale(stored: IntegerFormat, groups: tuple[int, int], scale: torch.Tensor) -> torch.Tensor:
    return stored_scale(scale, stored).expand(groups).contiguous()


def _zero(stored: IntegerFormat, groups: tuple[int, int], zero: torch.Tensor) -> torch.Tensor:
    values = stored_zero(zero, stored)
    return (signed(values) if stored.num_bits == 8 else values).expand(groups).contiguous()


def _words(
    *stored: torch.Tensor, decodes: Sequence[Callable[..., torch.Tensor]], num_words: int
) -> torch.Tensor:
    """Returns the two bfloat16 of each word of a row's scales and zero points, [N, 2 * words]."""
    scale, *zeros = (decode(part) for decode, part in zip(decodes, stored, strict=True))
    words = integer_words(scale.to(torch.bfloat16), zeros[0] if zeros else None)
    return words.repeat_interleave(num_words // words.shape[1], 1).view(torch.bfloat16)


def _exponents(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(E8M0)


def _products_of_scales(
    scale: torch.Tensor, outer: torch.Tensor, *, is_inverse: bool
) -> torch.Tensor:
    """Returns [N, K / 16] bfloat16, with infinity where kernels would overflow."""
    exact, factor = scale.float(), outer.float().reshape(())
    product = (exact / factor if is_inverse else exact * factor).to(torch.bfloat16)
    return product.masked_fill(product.abs() >= SCALE_LIMIT, torch.inf)
