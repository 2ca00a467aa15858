"""Attention that rounds its output adds up as it does without, built for a GPU without one."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
import re
from collections import Counter
import torch
from tests.support.absent_hopper import pretend
pretend()
from models.kernels.attention.decode import decode_attention
from models.kernels.attention.attention import attend
from models.kernels.launching.launch import _launches
from tests.support.attention_case import Heads, make_case
from tests.support.kernel_launches import absent_gpu

ARITHMETIC = re.compile(r"(fma|add|sub|rsqrt|ex2|mma)[.][a-z0-9.]*")
launch = decode_attention.Launch
decode_attention.Launch = lambda kernel, form, **options: launch(
    kernel, form=form._replace(has_assembly=True), **options
)

def sums_of(num_requests, heads, rounds, **options):
    "Returns the instructions of a step of single tokens whose order decides bits of its sums."
    with absent_gpu():
        case = make_case(
            [1] * num_requests, [50] * num_requests, heads, dtype=torch.float16, **options
        )
        attend(
            case.q, case.k, case.v, torch.zeros_like(case.q).contiguous(), case.cache,
            case.metadata, case.transform, case.sliding_window, case.sinks, 0.1, 0.0, rounds=rounds,
        )
    own = [each for each in _launches if each._kernel.__name__ == "decode_kernel"]
    (build,) = (build for each in own for build in each._builds.values())
    decode_attention._launcher.cache_clear()
    _launches.clear()
    found = Counter(match.group() for match in ARITHMETIC.finditer(build.asm["ptx"]))
    return {name: count for name, count in found.items() if "f32" in name or "mma" in name}

WINDOW = {"sliding_window": 40, "has_sinks": True}
FP8 = {"has_fp8_cache": True}
for num_requests, num_heads, num_kv_heads, options in (
    (130, 12, 1, WINDOW), (7, 32, 8, WINDOW | FP8), (130, 32, 8, {}), (7, 10, 2, {})
):
    heads = Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128)
    plain, rounded = (
        sums_of(num_requests, heads, rounds, **options) for rounds in (False, True)
    )
    assert plain == rounded, (num_requests, heads, options, plain, rounded)
    assert any("mma" in name for name in plain) and len(plain) > 3
"""


@pytest.mark.slow
def test_sums_do_not_depend_on_what_is_stored():
    run_building(PROGRAM)
