"""Finds the weights that a checkpoint stores in several tensors, before any of them is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from models.loading.checkpoint import CheckpointError, CheckpointTensor
from models.loading.dequantize import dequantize_fp4
from models.loading.gguf_code import GgufCode
from models.loading.integers import IntegerFormat, Layout, dequantize_integers, unpack_words
from models.loading.kept_gguf import kept_gguf
from models.loading.kept_packed import KeptWeight, kept_floats, kept_integers
from models.number_formats import E8M0, FP8, MXFP4_RUN, NVFP4_RUN
from models.quantization.config import QuantizationConfig, WeightKind, WeightScheme
from models.quantization.gguf import GROUP, KINDS

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGER_METHODS = ("awq", "gptq")
FIRST_PARTS = ("qweight", "weight_packed", "weight")
"""Names of the tensor that holds a weight's packed values."""
OTHER_PARTS = (
    "scales", "qzeros", "g_idx", "weight_scale", "weight_scale_2", "weight_zero_point",
    "weight_g_idx", "weight_shape", "weight_global_scale", "input_scale", "input_zero_point",
    "input_global_scale",
)  # fmt: skip
"""Names of tensors beside packed values. Activations are scaled by their own magnitudes."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One weight [N, K] that several stored tensors describe."""

    parts: tuple[torch.Tensor, ...]
    """Inputs of `decode`."""
    decode: Callable[..., torch.Tensor]
    shape: tuple[int, int]
    scheme: WeightScheme
    kept: KeptWeight | None
    """How a layer keeps it as it is; None if none can."""


def packed_module(name: str) -> tuple[str, str]:
    """Returns the module and the part that a stored tensor's name consists of."""
    module, _, part = name.rpartition(".")
    return module, part


def find_packed(
    stored: Mapping[str, CheckpointTensor],
    quantization: QuantizationConfig | None,
    dtype: torch.dtype,
) -> dict[str, PackedWeight]:
    """Returns the packed weights by the names of their first tensors.

    Raises:
        CheckpointError: a tensor is missing, has another shape than its fields say, or
            contradicts config.json.
    """
    found: dict[str, PackedWeight] = {}
    for name, tensor in stored.items():
        part = packed_module(name)[1]
        if tensor.code is not None:
            found |= _find_gguf(name, tensor, dtype)
            continue
        is_first = part in FIRST_PARTS
        if not is_first or (part == "weight" and not _is_packed(tensor.values, quantization)):
            continue
        try:
            found[name] = _Reader(stored, quantization, name, dtype).read()
        except ValueError as error:
            raise CheckpointError(f"{tensor.file}: tensor {tensor.name}: {error}") from error
    return found


def _find_gguf(name: str, tensor: CheckpointTensor, dtype: torch.dtype) -> dict[str, PackedWeight]:
    """Returns a GGUF tensor's weight if a layer can keep it as it is."""
    code = tensor.code
    kept = kept_gguf(tensor.values, code) if isinstance(code, GgufCode) else None
    if not isinstance(code, GgufCode) or kept is None:
        return {}
    scheme = WeightScheme(kind=KINDS[code.type.name], group_size=GROUP)
    num_rows, num_columns = code.shape
    decode = partial(code.decode, dtype=dtype)
    shape = num_rows, num_columns
    return {name: PackedWeight((tensor.values,), decode, shape, scheme, kept)}


def _is_packed(values: torch.Tensor, quantization: QuantizationConfig | None) -> bool:
    is_quark = quantization is not None and quantization.method == "quark"
    dtypes = (torch.uint8, torch.int8, torch.int32) if is_quark else (torch.uint8, torch.int8)
    return values.dtype in dtypes and values.dim() == 2


class _Reader:
    """Reads the headers of one module's tensors."""

    def __init__(
        self,
        stored: Mapping[str, CheckpointTensor],
        quantization: QuantizationConfig | None,
        name: str,
        dtype: torch.dtype,
    ) -> None:
        """Takes the model's name of the first tensor."""
        self._stored = stored
        self._quantization = quantization
        self._module, self._first_part = packed_module(name)
        self._stored_module = stored[name].module
        self._dtype = dtype

    def read(self) -> PackedWeight:
        """Returns the module's weight.

        Raises:
            ValueError: it cannot be decoded; says which tensor or field is wrong.
        """
        if self._quantization is None:
            raise ValueError("it holds packed values; config.json has no quantization_config")
        packed = self._part(self._first_part)
        method = self._quantization.method
        if self._first_part == "qweight":
            if method not in INTEGER_METHODS:
                raise ValueError(f"it is of AWQ or GPTQ; quant_method is {method}")
            scheme = self._scheme("int4", "int8")
            return self._awq(packed, scheme) if method == "awq" else self._gptq(packed, scheme)
        if packed.dtype == torch.int32 and method == "quark":
            return self._quark(packed, self._scheme("int4"))
        if packed.dtype == torch.int32:
            return self._packed_integers(packed, self._scheme("int4", "int8"))
        if packed.dtype == torch.int8 and "mxfp4" in self._quantization.kinds:
            return self._fp4(packed.view(torch.uint8), self._scheme("mxfp4"))  # DeepSeek V4's
        if packed.dtype == torch.int8:
            return self._plain_integers(packed, self._scheme("int8"))
        if packed.dtype == torch.uint8:
            return self._fp4(packed, self._scheme("mxfp4", "nvfp4"))
        raise ValueError(f"its dtype is {packed.dtype}; packed values are int32, int8 or uint8")

    def _scheme(self, *kinds: WeightKind) -> WeightScheme:
        assert self._quantization is not None, "read checked it"
        scheme = self._quantization.stored_scheme(self._stored_module, *kinds)
        if scheme is None:
            wanted = " or ".join(kinds)
            raise ValueError(f"it holds {wanted}; quantization_config describes no such weights")
        return scheme

    def _awq(self, packed: torch.Tensor, scheme: WeightScheme) -> PackedWeight:
        """Reads AWQ: qweight [K, N / 8], scales [K / G, N], qzeros [K / G, N / 8]."""
        num_columns, num_rows = _matrix(packed, torch.int32, "qweight", (1, 8))
        groups = _num_groups(num_columns, scheme)
        parts = {"q": packed, "scale": self._scale("scales", (groups, num_rows))}
        if not scheme.is_symmetric or self._has("qzeros"):
            parts["zero"] = self._int32("qzeros", (groups, num_rows // 8))
        return self._integers("awq", parts, 4, (num_rows, num_columns), scheme)

    def _quark(self, packed: torch.Tensor, scheme: WeightScheme) -> PackedWeight:
        """Reads Quark: as AWQ, maybe signed: weight, weight_scale, weight_zero_point."""
        num_columns, num_rows = _matrix(packed, torch.int32, "weight", (1, 8))
        groups = _num_groups(num_columns, scheme)
        parts = {"q": packed, "scale": self._scale("weight_scale", (groups, num_rows))}
        part = "weight_zero_point"
        if not scheme.is_symmetric or self._has(part):
            zeros = self._int32(part, (groups, num_rows // 8))
            # Zero points of signed integers are neutral if they are 0.
            if not (scheme.is_symmetric and scheme.is_signed and not zeros.any()):
                parts["zero"] = zeros
        layout: Layout = "awq" if scheme.is_shuffled else "quark"
        return self._integers(layout, parts, 4, (num_rows, num_columns), scheme)

    def _gptq(self, packed: torch.Tensor, scheme: WeightScheme) -> PackedWeight:
        """Reads GPTQ of 4 or 8 bits.

        qweight [K / P, N], scales [K / G, N], qzeros [K / G, N / P], g_idx [K]; P to a word.
        """
        bits = 4 if scheme.kind == "int4" else 8
        per_word = 32 // bits
        num_columns, num_rows = _matrix(packed, torch.int32, "qweight", (per_word, 1))
        # The last group may have fewer columns.
        size = scheme.group_size or num_columns
        groups = -(-num_columns // size)
        parts = {"q": packed, "scale": self._scale("scales", (groups, num_rows))}
        if not scheme.is_symmetric or self._has("qzeros"):
            zeros = self._int32("qzeros", (groups, -(-num_rows // per_word)))
            assert self._quantization is not None, "read checked it"
            may_be_neutral = scheme.is_symmetric or self._quantization.assumes_zero_points
            if not (may_be_neutral and _are_in_the_middle(zeros, bits)):
                parts["zero"] = zeros
        if scheme.has_order or self._has("g_idx"):
            parts["order"] = self._order("g_idx", num_columns, scheme)
        elif num_columns % size:
            parts["order"] = _runs(packed, num_columns, size)
        return self._integers("gptq", parts, bits, (num_rows, num_columns), scheme)

    def _packed_integers(self, packed: torch.Tensor, scheme: WeightScheme) -> PackedWeight:
        """Reads compressed-tensors' words, with P integers each.

        weight_packed [N, K / P], weight_scale [N, K / G], weight_zero_point [N / P, K / G].
        """
        bits = 4 if scheme.kind == "int4" else 8
        per_word = 32 // bits
        num_rows, num_columns = _matrix(packed, torch.int32, "weight_packed", (1, per_word))
        if self._has("weight_shape"):
            num_rows, num_columns = self._stored_shape(packed, per_word)
        groups = _num_groups(num_columns, scheme)
        parts = {"q": packed, "scale": self._scale("weight_scale", (num_rows, groups))}
        zeros = self._zero_points(scheme, bits)
        if zeros is not None:
            if zeros.dtype != torch.int32:
                raise ValueError(f"its weight_zero_point is {zeros.dtype}; it must be int32")
            parts["zero"] = _expect("weight_zero_point", zeros, (-(-num_rows // per_word), groups))
        if scheme.has_order or self._has("weight_g_idx"):
            parts["order"] = self._order("weight_g_idx", num_columns, scheme)
        shape = num_rows, num_columns
        return self._integers("compressed-tensors", parts, bits, shape, scheme)

    def _plain_integers(self, weight: torch.Tensor, scheme: WeightScheme) -> PackedWeight:
        """Reads bytes: weight [N, K], weight_scale [N, K / G] or one, weight_zero_point alike."""
        num_rows, num_columns = weight.shape
        groups = _num_groups(num_columns, scheme)
        parts = {"q": weight, "scale": self._scale("weight_scale", (num_rows, groups))}
        zeros = self._zero_points(scheme, num_bits=8)
        if zeros is not None:
            if zeros.dtype != torch.int8:
                raise ValueError(f"its weight_zero_point is {zeros.dtype}; it must be int8")
            parts["zero"] = _expect("weight_zero_point", zeros, (num_rows, groups), one=True)
        return self._integers("int8", parts, 8, (num_rows, num_columns), scheme)

    def _integers(
        self,
        layout: Layout,
        parts: Mapping[str, torch.Tensor],
        num_bits: int,
        shape: tuple[int, int],
        scheme: WeightScheme,
    ) -> PackedWeight:
        stored = IntegerFormat(
            layout=layout,
            num_bits=num_bits,
            shape=shape,
            parts=tuple(parts),
            zero_offset=scheme.zero_offset,
            is_signed=scheme.is_signed,
        )
        decode = partial(dequantize_integers, stored=stored, dtype=self._dtype)
        is_even = not shape[1] % (scheme.group_size or shape[1])
        kept = kept_integers(parts, stored, scheme.group_size) if is_even else None
        return PackedWeight(tuple(parts.values()), decode, shape, scheme, kept)

    def _fp4(self, packed: torch.Tensor, scheme: WeightScheme) -> PackedWeight:
        """Reads packed [N, K / 2], weight_scale [N, K / 16 or K / 32], and NVFP4's outer scale."""
        num_rows, num_columns = _matrix(packed, torch.uint8, "values", (1, 2))
        run, dtype = (MXFP4_RUN, torch.uint8) if scheme.kind == "mxfp4" else (NVFP4_RUN, FP8)
        if num_columns % run:
            raise ValueError(f"its {num_columns} columns are no multiple of {run}")
        scale = self._part("weight_scale")
        if scale.dtype == E8M0:
            scale = scale.view(torch.uint8)
        if scale.dtype != dtype:
            raise ValueError(f"its weight_scale is {scale.dtype}; it must be {dtype}")
        _expect("weight_scale", scale, (num_rows, num_columns // run))
        parts: tuple[torch.Tensor, ...] = packed, scale
        is_inverse, outer = self._has("weight_global_scale"), None
        if scheme.kind == "nvfp4":
            name = "weight_global_scale" if is_inverse else "weight_scale_2"
            outer = self._part(name)
            if outer.numel() != 1 or outer.dtype not in SCALE_DTYPES:
                raise ValueError(f"its {name} is {outer.dtype} {tuple(outer.shape)}, not one float")
            parts = *parts, outer
        decode = partial(dequantize_fp4, is_inverse=is_inverse, dtype=self._dtype)
        kept = kept_floats(packed, scale, outer, is_inverse=is_inverse)
        return PackedWeight(parts, decode, (num_rows, num_columns), scheme, kept)

    def _has(self, part: str) -> bool:
        return f"{self._module}.{part}" in self._stored

    def _part(self, part: str) -> torch.Tensor:
        name = f"{self._module}.{part}"
        if name not in self._stored:
            raise ValueError(f"its {name} is missing")
        return self._stored[name].values

    def _scale(self, part: str, shape: tuple[int, int]) -> torch.Tensor:
        scale = self._part(part)
        if scale.dtype not in SCALE_DTYPES:
            raise ValueError(f"its {part} is {scale.dtype}; scales are floats")
        return _expect(part, scale, shape, one=True)

    def _zero_points(self, scheme: WeightScheme, num_bits: int) -> torch.Tensor | None:
        """Returns compressed-tensors' zero points; None if integers are symmetric.

        Stored ones count also where the configuration says symmetric, unless they are neutral.
        """
        part = "weight_zero_point"
        if scheme.is_symmetric and not self._has(part):
            return None
        zeros = self._part(part)
        return None if scheme.is_symmetric and _are_neutral(zeros, num_bits) else zeros

    def _int32(self, part: str, shape: tuple[int, int]) -> torch.Tensor:
        values = self._part(part)
        if values.dtype != torch.int32:
            raise ValueError(f"its {part} is {values.dtype}; it must be int32")
        return _expect(part, values, shape)

    def _order(self, part: str, num_columns: int, scheme: WeightScheme) -> torch.Tensor:
        """Returns the group of each column."""
        size = scheme.group_size or num_columns
        num_groups = -(-num_columns // size)
        order = self._part(part)
        if order.dtype not in (torch.int32, torch.int64) or order.shape != (num_columns,):
            raise ValueError(
                f"its {part} is {order.dtype} {tuple(order.shape)}; "
                f"it must be int32 ({num_columns},)"
            )
        smallest, largest = (int(each) for each in order.aminmax())
        # No order was recorded: compressed-tensors writes -1 everywhere, some tools for GPTQ 0.
        if smallest == largest and (smallest == -1 or (smallest == 0 and not scheme.has_order)):
            return _runs(order, num_columns, size)
        if smallest < 0 or largest >= num_groups:
            raise ValueError(f"its {part} has groups {smallest} to {largest} of {num_groups}")
        return order

    def _stored_shape(self, packed: torch.Tensor, per_word: int) -> tuple[int, int]:
        """Returns the sizes that weight_shape says, whose rows are padded to whole words."""
        stored = self._part("weight_shape")
        sizes = stored.tolist() if stored.numel() == 2 else []
        rows, words = packed.shape
        if not sizes or sizes[0] != rows or -(-int(sizes[1]) // per_word) != words:
            raise ValueError(
                f"its weight_shape is {stored.tolist()}; it is packed to {tuple(packed.shape)}"
            )
        return int(sizes[0]), int(sizes[1])


def _matrix(
    packed: torch.Tensor, dtype: torch.dtype, part: str, per_element: tuple[int, int]
) -> tuple[int, int]:
    """Returns the sizes of the matrix that is packed, in the order of its storage."""
    if packed.dtype != dtype or packed.dim() != 2:
        raise ValueError(
            f"its {part} is {packed.dtype} {tuple(packed.shape)}; it must be a {dtype} matrix"
        )
    return packed.shape[0] * per_element[0], packed.shape[1] * per_element[1]


def _are_in_the_middle(zeros: torch.Tensor, num_bits: int) -> bool:
    """Returns whether GPTQ's zero points are those of symmetric integers; padding counts too.

    In either convention: some tools write the new one and do not say so.
    """
    smallest, largest = (int(each) for each in unpack_words(zeros, num_bits).aminmax())
    middle = 2 ** (num_bits - 1)
    return smallest == largest and smallest in (middle - 1, middle)


def _are_neutral(zeros: torch.Tensor, num_bits: int) -> bool:
    """Returns whether compressed-tensors' zero points are those of symmetric integers."""
    if not zeros.any():
        return True
    middle = 2 ** (num_bits - 1)
    return zeros.dtype == torch.int32 and bool((unpack_words(zeros, num_bits) == middle).all())


def _runs(like: torch.Tensor, num_columns: int, group_size: int) -> torch.Tensor:
    """Returns the group of each column of equal runs, on the device of `like`."""
    return torch.arange(num_columns, device=like.device) // group_size


def _num_groups(num_columns: int, scheme: WeightScheme) -> int:
    size = scheme.group_size or num_columns
    if num_columns % size:
        raise ValueError(f"group_size {size} does not divide its {num_columns} columns")
    return num_columns // size


def _expect(
    part: str, values: torch.Tensor, shape: tuple[int, int], *, one: bool = False
) -> torch.Tensor:
    """Returns `values` with the wanted shape; `one` also allows one value for all.

    Raises:
        ValueError: the shape is another one.
    """
    if one and values.numel() == 1:
        return values.reshape(1, 1)
    if tuple(values.shape) == shape or (shape[1] == 1 and tuple(values.shape) == shape[:1]):
        return values.reshape(shape)
    raise ValueError(f"its {part} has shape {tuple(values.shape)}; it must be {shape}")
