"""Registers of kernels, counted with the compiler that GPUs run."""

import pytest

from tests.unit.models.kernels.experts.test_fp8_expert_kernel import (
    test_every_height_fits_shared_memory_and_registers as fits_fp8_experts,
)
from tests.unit.models.kernels.products.test_packed_wide_linear import (
    test_unpacked_weights_stay_until_tensor_cores_have_read_them as fits_packed_products,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("check", [fits_fp8_experts, fits_packed_products])
def test_kernels_fit_into_registers(check):
    check()
