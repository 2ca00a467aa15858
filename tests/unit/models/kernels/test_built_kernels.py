"""All kernels that models launch, built for a GPU without one; in a process of its own."""

import pytest

from tests.support.programs import run_building

PROGRAM = """
import sys
from dataclasses import replace
from ctypes.util import find_library
from pathlib import Path
from services.engine.worker.start.build_processes import BuildProcesses
from services.engine.worker.start.kernel_building import _load_kernel_functions, found_in

processes = BuildProcesses.fork(_load_kernel_functions)
folder = Path(sys.argv[1])

import torch
from tests.support.absent_hopper import check_types, launched_by, pretend
pretend()
from models.kv_cache import FP8_CACHE_DTYPE
from models.number_formats import FP8
from models.batch_invariance import use_batch_invariance
from models.kernels.launching.kernel_builds import kernel_functions, load_kernel_functions
from models.kernels.ranks.exchange import launcher
from models.kernels.attention.attention import attend
from models.kernels.attention.segment_attention import segment_attention
from models.kernels.elementwise.block_parts import BlockParts, copy_block_parts
from models.kernels.elementwise.add_gated import add_gated
from models.kernels.elementwise.gated_rms_norm import gated_rms_norm
from models.kernels.elementwise.layer_norm import add_layer_norm, layer_norm
from models.kernels.elementwise.turn_heads import turn_heads
from models.kernels.elementwise.silu_and_mul import rounded_silu_and_mul
from models.ops.products.packed_linear import packed_linear
from models.kernels.products.add_adapters import add_adapters
from models.ops.products.adapted_linear import product_or_addends
from models.ops.products.add_adapters import add_slots
from models.kernels.products.fp8.fp8_linear import fp8_block_linear
from models.kernels.experts.moe import apply_experts
from tests.support.packed_quantization import quantize_packed
from tests.support.adapter_case import make_adapter_case
from tests.support.attention_case import Heads, make_case
from tests.support.block_sparse_case import make_block_sparse_case
from tests.support.compressed_case import make_compressed_case
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.kernel_launches import absent_gpu
from tests.support.latent_case import make_latent_case
from tests.support.expert_adapter_case import make_expert_adapters
from tests.support.moe_case import make_experts, make_quantized_experts
from tests.support.mxfp4_checkpoints import pack_experts
from tests.support.prefix_case import with_shared
from tests.support.quantized_checkpoints import WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint
from tests.support.recurrence_case import (
    make_conv_case, make_delta_case, make_linear_case, make_space_case, make_step, state_spec
)
from tests.support.stream_case import OPERATORS, make_stream_case

def fused():
    for num_tokens in (1, 8, 200):
        case = make_stream_case(num_tokens, 1024, 1024, 2048, is_gated=True)
        for operator in OPERATORS:
            case.fused(operator)

def communicating():
    row = torch.empty(1, 1024, dtype=torch.bfloat16)
    rounded, scale = row.to(FP8), torch.empty(1, 8)
    number = torch.empty(1, dtype=torch.int32)
    state = (torch.empty(4, dtype=torch.int64), number, number, number)
    for kernel in ("all_reduce_norm", "two_shot_norm"):
        for group in (None, 1024, 128):
            outputs = (row, None) if group is None else (rounded, scale)
            launch = launcher(kernel, 1024, 1, 4, 64, row.device, PARTS=0, GROUP=group or 1)
            launch((1, 1, 1), row, row, row, *outputs, *state, 1e-6, 1, 4, 2**36)
    for kernel in ("gather_rows", "reduce_scatter"):
        launcher(kernel, 1024, 1, 4, 64, row.device)((1, 1, 1), row, row, *state, 1, 2**36)

def rounded_attention():
    heads = Heads(num_heads=8, num_kv_heads=2, head_dim=128)
    for batch in (([1] * 3, [5, 600, 0]), ([1, 7, 40], [600, 7, 40])):
        for dtype in (torch.bfloat16, torch.float32):
            case = make_case(*batch, heads, dtype=dtype)
            attend(
                case.q, case.k, case.v, torch.empty_like(case.q).contiguous(), case.cache,
                case.metadata, case.transform, None, None, 0.1, 0.0, rounds=True,
            )

def shared_drafts():
    for head_dim, options in ((128, {}), (128, {"has_fp8_cache": True}), (64, {"has_sinks": True})):
        heads = Heads(num_heads=8, num_kv_heads=2, head_dim=head_dim)
        case = make_case([3] * 4, [90] * 4, heads, dtype=torch.bfloat16, **options)
        case = with_shared(case, [([0, 1, 2, 3], 4)])
        attend(
            case.q, case.k, case.v, torch.empty_like(case.q).contiguous(), case.cache,
            case.metadata, case.transform, None, case.sinks, 0.1, 0.0,
        )

def whole_blocks():
    rows = torch.empty(2, 128, dtype=torch.int64)
    parts = BlockParts.of([torch.empty(4, 64, dtype=torch.int64) for _ in range(2)])
    copy_block_parts(parts, torch.zeros(2, dtype=torch.int64), rows, writes=True)

def packed_products():
    for group, options in (
        (128, {}), (32, {"has_zeros": True}), (16, {"is_float": True}),
        (32, {"has_zeros": True, "num_bits": 8}), (1024, {"num_bits": 8}),
    ):
        weight = quantize_packed(torch.zeros(256, 1024), group, **options)
        for num_tokens in (1, 64, 200, 700):
            x = torch.zeros(num_tokens, 1024).bfloat16()
            packed_linear(x, *weight, None, True)
            packed_linear(x, *weight, torch.zeros(256).bfloat16(), False)

def experts_of_4_bits():
    for kind, size in (("nvfp4", 96), ("int4-32", 96), ("int4-64", 192), ("int4-128", 384)):
        experts = make_quantized_experts(kind, hidden=size, inner=size)
        for num_tokens in (1, 3, 10, 30, 60, 300, 700, 2000):
            ids = torch.zeros(num_tokens, 3, dtype=torch.int32)
            apply_experts(torch.zeros(num_tokens, size).bfloat16(), ids.float(), ids, experts)

def latents():
    sizes = {"num_heads": 3, "latent_dim": 64, "rope_dim": 16, "has_transform": True}
    for is_fp8 in (False, True):
        for top_k in (None, 3):
            make_latent_case([1], [9], **sizes, top_k=top_k, has_fp8_cache=is_fp8).run()
        for top_k in (3, 300):
            make_latent_case(
                [1], [9], **sizes, top_k=top_k, has_fp8_cache=is_fp8, has_sinks=True
            ).run()

def compressed_keys():
    sizes = {"num_heads": 64, "size": 512, "rope_dim": 64, "dtype": torch.bfloat16}
    for kind in ({}, {"rate": 4, "top_k": 8}, {"rate": 4, "top_k": 200}, {"rate": 32}):
        for lens in (([1], [90]), ([300], [300])):
            make_compressed_case(*lens, **sizes, **kind).run()

def chosen_blocks():
    heads = Heads(num_heads=32, num_kv_heads=2, head_dim=128)
    sizes = {"index_dim": 128, "block_size": 128, "top_blocks": 2, "dtype": torch.bfloat16}
    for is_fp8 in (False, True):
        for lens in (([1], [600]), ([300], [600])):
            make_block_sparse_case(*lens, heads, **sizes, has_fp8_cache=is_fp8).run()

def recurrent_states():
    for dtype in (torch.bfloat16, torch.float32):
        for lens in ([1, 5], [1, 200]):
            step = make_step(lens, state_spec(8, 64, 64))
            make_conv_case(step, dtype=dtype).run()
            make_delta_case(step, 4, dtype=dtype).run()
            make_delta_case(step, 8, dtype=dtype, decays_channels=True).run()
            make_space_case(step, 2, dtype=dtype).run()
            make_linear_case(step, dtype=dtype).run()
        step = make_step([1, 200], state_spec(8, 64, 64), num_slots=3)
        make_delta_case(step, 4, dtype=dtype).run()
        rows = torch.zeros(5, 128, dtype=dtype)
        gated_rms_norm(rows, rows, rows[0, :64], 1e-6, has_silu=True, gates_first=False)
        add_gated(rows, rows, rows, rows[:1])

def segments():
    for head_dim in (64, 72, 128):
        for dtype in (torch.bfloat16, torch.float32):
            heads = torch.zeros(200, 4, head_dim, dtype=dtype)
            bounds = torch.zeros(200, 2, dtype=torch.int32)
            segment_attention(heads, heads, heads, bounds, 0.1)
            rows, of_column = heads.flatten(1), heads[0].flatten()
            normed = layer_norm(rows, of_column, of_column, 1e-6)
            add_layer_norm(normed, rows, of_column, of_column, 1e-6)
            turn_heads(heads[:, :3], torch.zeros(200, 2, head_dim))

def adapted():
    weight = torch.zeros(1024, 1024).bfloat16()
    for num_tokens in (1, 20, 200, 600):
        for parts in ((64,), (64, 32, 32)):
            add_slots(*make_adapter_case(num_tokens, 1024, parts, 16, dtype=torch.bfloat16))
        _, x, *adapters = make_adapter_case(num_tokens, 1024, (512, 512), 16, dtype=torch.bfloat16)
        product, is_late = product_or_addends(x.contiguous(), weight, None, None)
        add_adapters(product, x.contiguous(), *adapters, is_gated=True, is_beside=is_late)

def adapted_experts():
    for dtype, sizes in ((torch.bfloat16, (512, 256)), (torch.float32, (36, 20))):
        plain = make_experts(hidden=sizes[0], inner=sizes[1], dtype=dtype)
        fp8 = make_quantized_experts("fp8", hidden=512, inner=256)
        cases = [(plain, 1), (plain, 200), (plain, 2000), (fp8, 200)]
        for kind in ("mxfp4",) if dtype == torch.float32 else ("mxfp4", "nvfp4", "int4-128"):
            packed = make_quantized_experts(
                kind, hidden=512, inner=256, is_clamped=True, dtype=dtype
            )
            cases += [(packed, 1), (packed, 200)]
        for experts, num_tokens in cases:
            adapters = make_expert_adapters(experts, num_tokens, rank=16, dtype=dtype)
            ids = torch.zeros(num_tokens, 3, dtype=torch.int32)
            hidden = torch.zeros(num_tokens, experts.down.shape[1], dtype=dtype)
            apply_experts(hidden, ids.float(), ids, replace(experts, adapters=adapters))

def on_other_gpus():
    rounded = rounded_silu_and_mul(torch.zeros(200, 192).bfloat16(), is_blocked=True)
    weight = torch.zeros(200, 96).to(FP8)
    fp8_block_linear(*rounded, weight, torch.zeros(2, 1), None, torch.bfloat16)

load_kernel_functions()
checkpoints = iter(folder / f"checkpoint-{number}" for number in range(100))

def made(variant, **overrides):
    path = next(checkpoints)
    write_checkpoint(path, variant, **overrides)
    return path

def drafting(variant, **overrides):
    path = next(checkpoints)
    path.mkdir()
    write_draft_checkpoint(path, variant, **overrides)
    return path

def packed(**overrides):
    path = next(checkpoints)
    pack_experts(path, write_checkpoint(path, "gpt_oss", **overrides))
    return path

def quantized(variant, **overrides):
    path = next(checkpoints)
    path.mkdir()
    quantize_checkpoint(made(variant, **overrides), path, "deepseek")
    return path

FULL_SIZE = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 128}
EXPERTS = {"moe_intermediate_size": 192}
LONG = {"max_position_embeddings": 512}
OF_8_BITS = {"cache_dtype": FP8_CACHE_DTYPE, "max_model_len": 256}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
with absent_gpu():
    builds = (
        launched_by(made("qwen3", **FULL_SIZE))
        | launched_by(made("qwen3", **FULL_SIZE), cache_dtype=FP8_CACHE_DTYPE)
        | launched_by(made("llama_odd_heads"), dtype=torch.float16)
        | launched_by(made("qwen3_windows"), dtype=torch.float32)
        | launched_by(made("gpt_oss", **FULL_SIZE | {"head_dim": 64}))
        | launched_by(made("gpt_oss"), cache_dtype=FP8_CACHE_DTYPE)
        | launched_by(made("llama4", **FULL_SIZE))
        | launched_by(made("llama4", **FULL_SIZE), cache_dtype=FP8_CACHE_DTYPE)
        | launched_by(made("mimo_v2", head_dim=192, v_head_dim=128))
        | launched_by(packed(intermediate_size=96), keep_quantized=True)
        | launched_by(packed(intermediate_size=96), keep_quantized=True, dtype=torch.float32)
        | launched_by(made("qwen3_moe_odd"))
        | launched_by(quantized("qwen3_moe", **WIDE, **EXPERTS), keep_quantized=True)
        | launched_by(made("glm4_moe_groups"), dtype=torch.float16)
        | launched_by(made("mixtral"), dtype=torch.float32)
        | launched_by(made("deepseek_v2_groups"), dtype=torch.float32)
        | launched_by(drafting("deepseek_v3", **LATENT, **LONG), num_drafts=2, max_model_len=256)
        | launched_by(drafting("deepseek_v32"), num_drafts=2)
        | launched_by(made("deepseek_v3", **LATENT, **LONG), **OF_8_BITS)
        | launched_by(made("deepseek_v32", index_head_dim=32, **LONG), **OF_8_BITS)
        | launched_by(made("qwen3_moe"), num_ranks=2)
        | launched_by(made("qwen3_moe"), data_parallel_size=2)
        | launched_by(packed(intermediate_size=96), keep_quantized=True, num_ranks=2)
        | launched_by(quantized("qwen3_moe", **WIDE, **EXPERTS), keep_quantized=True, num_ranks=2)
        | found_in(
            [fused, communicating, rounded_attention, shared_drafts, packed_products,
             experts_of_4_bits, latents, compressed_keys, chosen_blocks, recurrent_states,
             segments, adapted, adapted_experts, on_other_gpus, whole_blocks]
        )
    )
    use_batch_invariance(is_on=True)
    builds |= (
        launched_by(made("qwen3", **FULL_SIZE, intermediate_size=2048))
        | launched_by(made("qwen3", **FULL_SIZE), cache_dtype=FP8_CACHE_DTYPE)
        | launched_by(made("gpt_oss", **FULL_SIZE | {"head_dim": 64}), dtype=torch.float16)
        | launched_by(made("gemma2", head_dim=256), dtype=torch.bfloat16)
        | launched_by(made("llama4", **FULL_SIZE))
        | launched_by(made("glm4_moe_groups"), dtype=torch.float32)
        | launched_by(quantized("qwen3", **WIDE), keep_quantized=True)
        | launched_by(quantized("qwen3_moe", **WIDE, **EXPERTS), keep_quantized=True)
        | launched_by(drafting("deepseek_v3", **LATENT, **LONG), num_drafts=2, max_model_len=256)
        | launched_by(made("deepseek_v3", **LATENT, **LONG), **OF_8_BITS)
        | found_in([packed_products, experts_of_4_bits, adapted, adapted_experts])
    )
errors = check_types(builds.values())
assert not errors, chr(10).join(errors)

one_of_each = {(build.module, build.name): build for build in builds.values()}
kernels = {(function.module, function.fn.__name__) for function in kernel_functions()}
kernels = {(module, name) for module, name in kernels if name.endswith("_kernel")}
assert kernels == set(one_of_each), kernels ^ set(one_of_each)

# Triton's launchers are linked to the driver's library, without a GPU as well.
if find_library("cuda") is not None:
    report = processes.wait(processes.begin(list(one_of_each.values())))
    assert not report.num_failed, report.error
    # Triton finds what others have built.
    assert all(build.is_kept for build in one_of_each.values())
    print(len(builds), "kernels,", report)
"""


@pytest.mark.slow
def test_every_kernel_passes_the_compiler_as_models_launch_it(tmp_path):
    run_building(PROGRAM, tmp_path)
