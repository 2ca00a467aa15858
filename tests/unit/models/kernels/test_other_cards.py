"""Kernels that models launch on cards that no table was measured on, built without one.

Each case is a program of its own, as Triton reads its environment while kernels are imported.
"""

import pytest

from tests.support.gpu_facts import CARDS
from tests.support.programs import run_building

PROGRAM = """
import sys
from pathlib import Path
card, part, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
from tests.support.absent_hopper import launched_by, pretend
pretend(card)
import torch
from triton.runtime.cache import get_cache_manager
from models.batch_invariance import use_batch_invariance
from models.kernels.gpu import FP8_CAPABILITY
from models.kernels.launching.kernel_builds import load_kernel_functions
from models.kv_cache import FP8_CACHE_DTYPE
from services.engine.worker.start.kernel_building import found_in
from tests.support.allocated_memory import allocated_memory
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.gpu_facts import CARDS
from tests.support.kernel_launches import absent_gpu
from tests.support.latent_case import make_latent_case
from tests.support.mxfp4_checkpoints import pack_experts
from tests.support.quantized_checkpoints import WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.recurrence_case import (
    make_conv_case, make_delta_case, make_linear_case, make_space_case, make_step, state_spec
)

load_kernel_functions()
checkpoints = iter(folder / f"checkpoint-{number}" for number in range(100))

def made(variant, **overrides):
    path = next(checkpoints)
    write_checkpoint(path, variant, **overrides)
    return path

def packed():
    path = next(checkpoints)
    pack_experts(path, write_checkpoint(path, "gpt_oss", intermediate_size=96))
    return path

def quantized(variant, **overrides):
    path = next(checkpoints)
    path.mkdir()
    quantize_checkpoint(made(variant, **overrides), path, "deepseek")
    return path

def recurrent_states():
    for dtype in (torch.bfloat16, torch.float32):
        for lens in ([1, 5], [1, 200]):
            step = make_step(lens, state_spec(8, 128, 128))
            make_conv_case(step, dtype=dtype).run()
            make_delta_case(step, 4, dtype=dtype).run()
            make_delta_case(step, 8, dtype=dtype, decays_channels=True).run()
            make_space_case(step, 2, dtype=dtype).run()
            make_linear_case(step, dtype=dtype).run()

def latents(dtypes=(torch.bfloat16, torch.float32), caches=(False,)):
    for dtype in dtypes:
        for lens in ([1], [300], [100] * 3):
            for is_fp8 in caches:
                make_latent_case(
                    lens, lens, num_heads=64, latent_dim=512, rope_dim=64, plain_dim=128,
                    value_dim=128, dtype=dtype, has_fp8_cache=is_fp8,
                ).run()

HEADS = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 128}
EXPERTS = {"moe_intermediate_size": 192}
FLOAT = {"dtype": torch.float32}

def dense():
    return (
        launched_by(made("qwen3", **HEADS))
        | launched_by(made("gemma2", head_dim=256))
        | launched_by(made("gpt_oss", **HEADS | {"head_dim": 64}), dtype=torch.float16)
    )

def in_float32():
    return (
        launched_by(made("qwen3", **HEADS), **FLOAT)
        | launched_by(made("gemma2", head_dim=256), **FLOAT)
        | launched_by(made("mixtral"), **FLOAT)
    )

def experts():
    return launched_by(made("qwen3_moe", **WIDE, **EXPERTS)) | launched_by(made("qwen3_moe_odd"))

def mxfp4():
    kept = {"keep_quantized": True}
    return launched_by(packed(), **kept) | launched_by(packed(), **kept, **FLOAT)

def states_and_latents():
    return found_in([recurrent_states, latents])

def rounded():
    if CARDS[card].capability < FP8_CAPABILITY:
        return {}
    kept = {"keep_quantized": True}
    in_8_bits = {"cache_dtype": FP8_CACHE_DTYPE}
    return (
        launched_by(made("qwen3", **HEADS), **in_8_bits)
        | launched_by(made("gemma2", head_dim=256), **in_8_bits)
        | launched_by(quantized("qwen3", **WIDE), **kept)
        | launched_by(quantized("qwen3_moe", **WIDE, **EXPERTS), **kept)
        | found_in([lambda: latents((torch.bfloat16,), (True,))])
    )

def invariant():
    use_batch_invariance(is_on=True)
    return dense() | experts() | rounded() | found_in([lambda: latents((torch.bfloat16,))])

with absent_gpu(card):
    builds = globals()[part]()
wrong = []
for build in builds.values():
    kept = get_cache_manager(build.key)
    if kept.has_file("fits"):
        continue
    try:
        shared, columns = allocated_memory(build)
    except Exception as error:
        wrong.append(f"{build.name} {dict(build.constants)}: {error}")
        continue
    if shared > CARDS[card].shared_bytes or columns > 512:
        wrong.append(f"{build.name} {dict(build.constants)}: {shared} bytes, {columns} columns")
    else:
        kept.put("", "fits", binary=False)
assert not wrong, chr(10).join(wrong)
"""
PARTS = ["dense", "in_float32", "experts", "mxfp4", "states_and_latents", "rounded", "invariant"]


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("card", [card for card in CARDS if card != "H200"])
def test_every_kernel_fits_the_card(tmp_path, card, part):
    run_building(PROGRAM, card, part, tmp_path)
