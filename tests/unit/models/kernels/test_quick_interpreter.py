"""tests.support.quick_interpreter changes no bit and no error of Triton's interpreter."""

import pytest

from tests.support.programs import run_interpreted

PROGRAM = """
import torch
torch.set_num_threads(1)
from triton.runtime.errors import InterpreterError
from models.kernels.attention import attention
from models.kernels.elementwise.rms_norm import rms_norm
from models.kernels.products.fp8.fp8_linear import quantize
from tests.support.attention_case import Heads, make_case
from tests.support.quick_interpreter import interpret_quickly
from tests.support.sampling_kernels import PARAMS, drawn_by_kernel, mixed_choice, random_logits

def attended(dtype, **options):
    torch.manual_seed(0)
    heads = Heads(num_heads=3, num_kv_heads=1, head_dim=68)
    case = make_case([1, 7, 1], [70, 7, 1], heads, dtype=dtype, has_sinks=True, **options)
    output = torch.full(case.q.shape, torch.nan, dtype=dtype)
    attention.attend(
        case.q, case.k, case.v, output, case.cache, case.metadata, case.transform, None,
        case.sinks, 0.3, 0.0,
    )
    return output

def refused():
    # Not a number but a pointer, in a function that the kernel calls.
    try:
        rms_norm(torch.ones(2, 8), torch.ones(8), torch.ones(8))
    except InterpreterError as error:
        return str(error)

def results():
    torch.manual_seed(0)
    logits = random_logits(len(PARAMS), 300, torch.bfloat16)
    return [
        attended(torch.float32), attended(torch.float16),
        attended(torch.float32, has_fp8_cache=True),
        drawn_by_kernel(logits, mixed_choice(len(PARAMS))), *quantize(torch.randn(3, 256), 128),
    ]

def check_same(before, after):
    for each, again in zip(before, after, strict=True):
        assert each.dtype == again.dtype and each.shape == again.shape
        assert torch.equal(each.float().nan_to_num(), again.float().nan_to_num())

before, error = results(), refused()
assert error, "refused"
interpret_quickly()
check_same(before, results())
assert refused() == error
"""


@pytest.mark.slow
def test_it_gives_the_same_results_and_errors():
    run_interpreted(PROGRAM, is_quick=False)
