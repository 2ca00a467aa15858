"""Integers of GPTQ's words, as GPTQModel stores and reads them."""

import pytest
import torch

from models.loading.checkpoint import CheckpointTensor
from models.loading.integers import IntegerFormat, stored_zero
from models.loading.packed_weights import find_packed
from models.quantization.read import read_quantization
from scripts.quantizers import gptq

ZEROS = {4: [0, 0, 5, 15, 0, 8, 15, 1], 8: [0, 255, 0, 7]}
ONES = {4: 0x11111111, 8: 0x01010101}


def packed(values, bits):
    word = sum(value << bits * place for place, value in enumerate(values))
    return torch.tensor([[word - 2**32 if word >= 2**31 else word]], dtype=torch.int32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [0, 1])
def test_a_zero_point_of_0_borrows_from_the_next_one(bits, offset):
    zeros = ZEROS[bits]
    # GPTQModel, gptqmodel/utils/model.py: convert_gptq_v2_to_v1_format_module takes one word away.
    word = packed(zeros, bits) - offset * ONES[bits]
    stored = IntegerFormat(
        layout="gptq", num_bits=bits, shape=(len(zeros), 32), parts=(), zero_offset=offset
    )
    assert stored_zero(word, stored).squeeze(1).tolist() == zeros


@pytest.mark.parametrize("stored_zero", [7, 8])
@pytest.mark.parametrize(
    ("fields", "has_zeros"),
    [({}, False), ({"sym": False}, False), ({"sym": False, "checkpoint_format": "gptq"}, True)],
)
def test_zero_points_all_in_the_middle_are_neutral_unless_a_field_says_otherwise(
    stored_zero, fields, has_zeros
):
    parts, _ = gptq(32)(torch.randn(16, 64))
    parts["qzeros"] = packed([stored_zero] * 8, 4).repeat(2, 2)
    stored = {f"a.{name}": CheckpointTensor(None, f"a.{name}", x) for name, x in parts.items()}
    config = read_quantization({"quant_method": "gptq", "bits": 4, "group_size": 32} | fields)
    found = find_packed(stored, config, torch.float32)["a.qweight"]
    assert found.kept.packing.has_zeros is has_zeros
