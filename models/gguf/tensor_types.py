"""The types of tensors in GGUF files: names, and the bytes of their blocks.

Source: github.com/ggml-org/llama.cpp, ggml/include/ggml.h (enum ggml_type) and ggml-common.h.
"""

from dataclasses import dataclass

from models.gguf.errors import GgufError


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type: `num_bytes` bytes hold `block_size` neighbours of a row."""

    name: str
    block_size: int
    num_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
"""Number in a file -> type."""

PLAIN_TYPES = ("F32", "F16", "BF16")

_OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4",
}  # fmt: skip


def tensor_type(number: int) -> TensorType:
    """Returns the type with a number.

    Raises:
        GgufError: it is not supported.
    """
    if number in TENSOR_TYPES:
        return TENSOR_TYPES[number]
    names = ", ".join(each.name for each in TENSOR_TYPES.values())
    raise GgufError(f"its type is {_OTHERS.get(number, number)}; the supported ones are {names}")
