"""Kernels find the elements of the tensors that real steps launch them with; without a GPU."""

import pytest
import torch

from models.kernels.launching.kernel_builds import launches_skipped
from models.kernels.products.fp8.fp8_linear import quantize
from models.kernels.sampling.penalize_tokens import penalize_tokens
from models.kernels.sampling.step_tokens import last_tokens
from tests.support.kernel_launches import absent_gpu
from tests.support.launch_layouts import UnreadableTensorError, layouts_checked
from tests.support.programs import run_building

PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path

import torch
from scripts.quantize_tiny import FORMATS, write_quantized
from tests.support.absent_hopper import launched_by, pretend
pretend()
from models.cudagraph_mode import CUDAGraphMode
from models.kv_cache import FP8_CACHE_DTYPE
from models.loading.loader import load_model
from models.batch_invariance import use_batch_invariance
from services.engine.worker.start.kernel_building import found_in
from services.engine.worker.start.warm_up import largest_step
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.eagle3_checkpoints import write_eagle3_head
from tests.support.graph_engine import GraphEngine
from tests.support.kernel_launches import absent_gpu
from tests.support.launch_layouts import layouts_checked
from tests.support.mxfp4_checkpoints import pack_experts
from tests.support.quantized_checkpoints import WIDE, quantize_checkpoint
from tests.support.random_checkpoints import write_checkpoint

folder = Path(sys.argv[1])
checkpoints = iter(folder / f"checkpoint-{number}" for number in range(100))
ONE, SHORT = [[5]], [[5, 17, 3]]
EDITED = {
    "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.4, "logprobs": 2,
    "prompt_logprobs": 1, "logit_bias": ((3, 1.0),), "min_tokens": 2,
    "end_token_ids": frozenset({1, 2}),
}
TUNED = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 128}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
FP8_CACHE = {"cache_dtype": FP8_CACHE_DTYPE}

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

def quantized(variant, kind, **overrides):
    path = next(checkpoints)
    path.mkdir()
    quantize_checkpoint(made(variant, **WIDE, **overrides), path, kind)
    return path

def of_4_bits(form, variant, **overrides):
    path = next(checkpoints)
    write_quantized(made(variant, **WIDE, **overrides), path, FORMATS[form])
    return path

def eagle3(model):
    head = next(checkpoints)
    head.mkdir()
    write_eagle3_head(head, model, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    return head

def serve(path, level, *, dtype=torch.bfloat16, keeps_format=False, **options):
    if keeps_format:
        cpu = torch.device("cpu")
        options["model"] = load_model(path, device=cpu, dtype=dtype, keep_quantized=True)
    flags = {"use_inductor": False} if level else {}
    has_graphs = level and not keeps_format
    if has_graphs:
        mode = CUDAGraphMode.FULL_AND_PIECEWISE
        flags |= {"cudagraph_mode": mode, "cudagraph_capture_sizes": (1, 2, 4)}
    engine = GraphEngine(path, compilation_config(level=level, **flags), dtype=dtype, **options)
    def run():
        engine.capture(3)
        size = engine.limits.max_model_len * 5 // 8
        long = [[9] * size, [7] * size, [3] * 5]
        for prompts, sampling in ((ONE, {}), (SHORT, EDITED), (long, {}), (long, EDITED)):
            engine.run(prompts, 2, **sampling)
        num_queries = engine.limits.decode_q_len
        for num_requests in (1, 3):
            sizes = {"max_num_seqs": num_requests, "max_num_batched_tokens": 3 * num_queries}
            engine.runner.execute(largest_step(replace(engine.limits, **sizes)))
    # While serving every launch asks Triton, and none is remembered.
    found_in([run], while_serving=True)

def families(level):
    for variant in ("llama_one_kv_head", "qwen3", "gemma2", "gpt_oss", "phi3_partial_rotary",
                    "glm4_moe_groups", "mixtral", "deepseek_v2_groups", "deepseek_v32"):
        serve(made(variant), level)
    serve(made("qwen3_moe_odd"), level, dtype=torch.float16)
    serve(made("llama_odd_heads"), level, dtype=torch.float32)
    serve(made("qwen3", **TUNED), level, block_size=16)
    sizes = {"max_num_batched_tokens": 128, "max_model_len": 128}
    serve(made("qwen3", **TUNED), level, block_size=16, **FP8_CACHE, **sizes)
    serve(made("deepseek_v3", **LATENT), level, **FP8_CACHE)
    serve(made("deepseek_v32", index_head_dim=32), level, **FP8_CACHE)

def weights():
    def serve_packed(path, **options):
        for level in (0, 3):
            serve(path, level, keeps_format=True, **options)

    for kind in ("deepseek", "compressed_channel"):
        path = quantized("qwen3", kind)
        for dtype in (torch.bfloat16, torch.float16):
            serve_packed(path, dtype=dtype)
        for size in (192, 200):  # the copy engine takes the first
            serve_packed(quantized("qwen3_moe", kind, moe_intermediate_size=size))
    serve_packed(packed(intermediate_size=96))
    for form in ("compressed-int4-32", "modelopt-nvfp4"):
        serve_packed(of_4_bits(form, "qwen3_moe", moe_intermediate_size=96))

def drafts(level):
    serve(drafting("deepseek_v3"), level, num_speculative_tokens=1)
    serve(drafting("deepseek_v32"), level, num_speculative_tokens=3)
    small = made("llama", num_hidden_layers=4)
    serve(small, level, num_speculative_tokens=3, lookup_sizes=(1, 3))
    for source in (small, eagle3(small)):
        serve(small, level, num_speculative_tokens=3, draft_model=source)

def ranks():
    launched_by(made("qwen3_moe"), num_ranks=2)
    launched_by(made("qwen3_moe"), data_parallel_size=2)
    launched_by(packed(intermediate_size=96), keep_quantized=True, num_ranks=2)

def invariant():
    use_batch_invariance(is_on=True)
    for level in (0, 3):
        serve(made("qwen3", **TUNED), level, block_size=16)
        serve(made("gemma2"), level, **FP8_CACHE)
        serve(made("glm4_moe_groups"), level, dtype=torch.float32)
        serve(quantized("qwen3", "deepseek"), level, keeps_format=True)

SCENARIOS = {
    "families": lambda: families(0), "compiled_families": lambda: families(3),
    "weights": weights, "drafts": lambda: (drafts(0), drafts(3)),
    "ranks": ranks, "invariant": invariant,
}
with absent_gpu(), layouts_checked() as counts:
    SCENARIOS[sys.argv[2]]()
print(len(counts), "kernels,", sum(counts.values()), "launches")
for kernel in sys.argv[3:]:
    assert counts.get(kernel), f"no step launched {kernel}"
"""

LAUNCHED = {
    "families": ["_rotate_and_cache_kernel", "_latent_cache_kernel", "_score_kernel"],
    "compiled_families": [
        "decode_kernel",
        "_hopper_attention_kernel",
        "_widen_kernel",
        "_few_queries_kernel",
    ],
    "weights": ["_narrow_fp8_kernel", "_quantize_kernel", "_gate_up_kernel", "fp8_expert_kernel"],
    "drafts": ["_penalize_kernel", "_choose_kernel", "_mask_kernel", "_top_logprobs_kernel"],
    "ranks": ["_route_kernel", "_sort_kernel"],
    "invariant": ["_invariant_kernel", "_matrix_kernel", "_fixed_kernel"],
}
"""Some of the kernels of each scenario: steps that launch others check nothing."""


@pytest.fixture
def launched():
    with absent_gpu(), launches_skipped(while_serving=True), layouts_checked() as counts:
        yield counts


def penalize(row_ids, tokens):
    numbers, factors = torch.ones(2, dtype=torch.int64), torch.ones(2)
    penalize_tokens(
        torch.zeros(2, 8), numbers, tokens, row_ids, numbers.int(), numbers,
        factors, factors, factors,
    )  # fmt: skip


def test_a_row_that_stands_for_several_is_found(launched):
    rows, tokens = torch.zeros(1, dtype=torch.int32), torch.zeros(3, 9, dtype=torch.int32)
    penalize(rows.repeat(2), tokens[:, :4])
    with pytest.raises(UnreadableTensorError, match="_count_kernel's row_ids_ptr"):
        penalize(rows.expand(2), tokens[:, :4])
    assert launched == {"_count_kernel": 2, "_penalize_kernel": 1}


def test_a_table_whose_columns_are_apart_is_found(launched):
    rows, tokens = torch.zeros(2, dtype=torch.int32), torch.zeros(3, 9, dtype=torch.int32)
    with pytest.raises(UnreadableTensorError, match="tokens_ptr"):
        penalize(rows, tokens[:, ::2])


def test_every_second_number_is_found(launched):
    numbers = torch.ones(8, dtype=torch.int32)
    places = {"input_ids": numbers[:4].clone(), "positions": torch.zeros(4, dtype=torch.int64)}
    last_tokens(numbers.view(2, 4), numbers[:4], numbers[4:], **places)
    with pytest.raises(UnreadableTensorError, match="seq_lens_ptr"):
        last_tokens(numbers.view(2, 4), numbers[:4], numbers[::2], **places)


def test_scales_of_which_a_launch_passes_all_strides_are_not(launched):
    for is_transposed in (False, True):
        quantize(torch.zeros(3, 256), 128, is_transposed=is_transposed)
    assert launched == {"_quantize_kernel": 2}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LAUNCHED)
def test_kernels_can_read_the_tensors_of_real_steps(tmp_path, scenario):
    run_building(PROGRAM, tmp_path, scenario, *LAUNCHED[scenario])
