from dataclasses import replace

import pytest
import torch

from models.config import ModelConfig
from models.forward_context import AttentionWorkspace
from models.kernels.attention.configurations import (
    EARLY_REQUESTS,
    MAX_PARTIALS,
    decode_tiles,
    num_dealt,
    num_splits,
)
from models.kernels.experts.expert_forms import COMMON, OF_8_BITS, ON_CORES, are_few, tile_rows
from models.kernels.products.fp8.fp8_configurations import BUILT_TOKENS
from models.kernels.products.packed.packed_configurations import BUILT_TOKENS as PACKED_TOKENS
from models.kernels.products.packed.packed_configurations import MOST_PACKED_TOKENS
from models.kernels.products.wide_configurations import invariant_wide_tiles, wide_tiles
from models.kernels.recurrence.convolution_forms import MOST_FEW, tokens_of_a_program
from models.loading.loader import load_model
from models.quantization.read import read_quantization
from scripts.quantize_tiny import FORMATS, write_quantized
from services.engine.limits import LEAST_SHARING_REQUESTS, StepLimits
from services.engine.worker.inputs.batch import Batch
from services.engine.worker.start import warm_up
from services.engine.worker.start.kv_memory import probe_runner
from services.engine.worker.start.warm_up import (
    FIRST_STEPS,
    all_steps,
    early_steps,
    gates_of,
    largest_step,
    later_steps,
    prompts_of,
    run_small_steps,
    small_step_of_everything,
)
from tests.support.damaged_checkpoints import FP8_CONFIG
from tests.support.gpu_facts import use_gpu
from tests.support.invariance import batch_invariance
from tests.support.quantized_checkpoints import WIDE
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")


def limits_of(**others):
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "max_model_len": 100}
    return StepLimits(**(sizes | {"block_size": 16, "vocab_size": 97} | others))


class CountingRunner:
    """A runner that counts its steps."""

    def __init__(self, runner):
        self.runner = runner
        self.device = runner.device
        self.buffers = runner.buffers
        self.num_tokens = []
        self.with_plan = []

    def execute(self, descriptor):
        context, prefixes = descriptor.context, self.buffers.prefixes
        self.num_tokens.append(context.num_tokens)
        if prefixes and prefixes.plan(torch.ones(context.batch_size, dtype=torch.int32)):
            self.with_plan.append(context.num_tokens)
        return self.runner.execute(descriptor)


def test_one_runner_runs_steps_of_all_kinds_that_fit(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    for max_num_seqs, max_num_batched_tokens, expected in [
        (256, 2048, [1, 128, 2, 8, 16, 32, 64, 128, 4, 3, 129, 33, 256, 512, 520]),
        (1, 4, [1, 4]),
        (40, 40, [1, 2, 8, 16, 32, 4, 3, 33, 33, 40]),
    ]:
        limits = limits_of(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=128,
        )
        runner = CountingRunner(probe_runner(model, limits=limits, dtype=torch.float32, device=CPU))
        run_small_steps(runner, limits, all_steps(model.config, limits, ()))
        assert runner.num_tokens == expected


def test_steps_that_may_share_prefixes_also_run_with_a_plan(tmp_path):
    write_checkpoint(tmp_path, "qwen3")
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    limits = limits_of(max_num_seqs=40, shared_prefix_tokens=64)
    runner = CountingRunner(probe_runner(model, limits=limits, dtype=torch.float32, device=CPU))
    run_small_steps(runner, limits, all_steps(model.config, limits, ()))
    assert runner.with_plan == [8, 16, 32, 8, 4, 33]
    assert runner.num_tokens.count(8) == 4  # decodes, and prompts of two tokens
    assert runner.num_tokens.count(2) == 1


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(64, (16,) * 4), (10, (10,)), (4096, (16,) * 40), (17, (16,))]
)
def test_tokens_of_a_graph_are_prompts_of_a_block(num_tokens, expected):
    limits = limits_of(max_num_seqs=40, max_num_batched_tokens=8192, max_model_len=128)
    assert prompts_of(num_tokens, limits) == expected


def form(num_tokens, num_experts, top_k, forms=COMMON):
    """Returns the facts that decide on the kernels of experts."""
    num_pairs = num_tokens * top_k
    if are_few(num_pairs, num_experts, top_k, forms):
        return "pairs"
    return tile_rows(num_pairs, num_experts, forms)


@pytest.mark.parametrize("max_model_len", [100, 4096])
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(8, 2), (32, 4), (64, 6), (128, 8), (160, 6), (256, 8), (7, 7)]
)
def test_every_way_through_experts_is_warmed_up(tmp_path, num_experts, top_k, max_model_len):
    write_checkpoint(tmp_path, "qwen3_moe")
    config = ModelConfig.from_folder(tmp_path)
    moe = replace(config.moe, num_experts=num_experts, num_experts_per_tok=top_k)
    limits = limits_of(max_model_len=max_model_len)
    steps = all_steps(replace(config, moe=moe), limits, ())
    warmed_up = {form(sum(q_lens), num_experts, top_k) for q_lens in steps if fits(q_lens, limits)}
    assert warmed_up == {form(count, num_experts, top_k) for count in range(1, 4097)}


@pytest.mark.parametrize(("num_experts", "top_k"), [(32, 4), (128, 4)])
@pytest.mark.parametrize(
    ("quantization", "others"),
    [
        ({"quant_method": "mxfp4"}, ON_CORES),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, ON_CORES),
        (dict(FORMATS["quark-mxfp4"].config), ON_CORES),
        (dict(FORMATS["modelopt-nvfp4"].config), ON_CORES),
        (FP8_CONFIG, OF_8_BITS),
    ],
    ids=["stacked mxfp4", "int4", "mxfp4", "nvfp4", "fp8"],
)
def test_every_way_through_quantised_experts_is_warmed_up(
    tmp_path, quantization, others, num_experts, top_k
):
    write_checkpoint(tmp_path, "qwen3_moe")
    config = ModelConfig.from_folder(tmp_path)
    moe = replace(config.moe, num_experts=num_experts, num_experts_per_tok=top_k)
    limits = limits_of(max_num_batched_tokens=16384, max_model_len=4096)
    config = replace(config, moe=moe, quantization=read_quantization(quantization))
    steps = [each for each in all_steps(config, limits, ()) if fits(each, limits)]
    for forms in (COMMON, others):
        warmed_up = {form(sum(q_lens), num_experts, top_k, forms) for q_lens in steps}
        assert warmed_up == {form(count, num_experts, top_k, forms) for count in range(1, 16385)}


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("group", [1, 8, 16])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("window", [0, 128])
def test_every_way_through_decode_attention_is_warmed_up(
    tmp_path, window, cache_dtype, group, num_kv_heads
):
    workspace = AttentionWorkspace(
        partials=torch.empty(0),
        lse=torch.empty(MAX_PARTIALS * group),
        counters=torch.empty(MAX_PARTIALS),
    )

    def form(num_requests):
        heads = {"num_heads": num_kv_heads * group, "num_kv_heads": num_kv_heads}
        tiles = decode_tiles(
            torch.bfloat16, cache_dtype, 128, num_requests=num_requests, window=window,
            device=CPU, **heads,
        )  # fmt: skip
        dealt = num_dealt(workspace, num_requests, num_kv_heads, tiles, window=window)
        splits = num_splits(workspace, num_requests, *heads.values(), cache_dtype, tiles)
        shares = num_requests >= LEAST_SHARING_REQUESTS
        return tiles, dealt, dealt > 0 or splits > 1, num_requests <= EARLY_REQUESTS, shares

    write_checkpoint(tmp_path, "qwen3")
    config = replace(ModelConfig.from_folder(tmp_path), num_key_value_heads=num_kv_heads)
    limits = limits_of(shared_prefix_tokens=512)
    steps = [*FIRST_STEPS, *early_steps(config, limits)]
    assert any(max(each) > 1 and len(each) >= LEAST_SHARING_REQUESTS for each in steps)
    warmed_up = {form(len(each)) for each in steps if max(each) == 1 and fits(each, limits)}
    assert warmed_up == {form(count) for count in range(1, 257)}


@pytest.mark.parametrize("max_model_len", [60, 128, 4096])
def test_steps_run_kernels_of_parts_whatever_the_length_of_requests(tmp_path, max_model_len):
    write_checkpoint(tmp_path, "qwen3")
    limits = limits_of(max_model_len=max_model_len)
    steps = all_steps(ModelConfig.from_folder(tmp_path), limits, ())
    assert set(BUILT_TOKENS) <= {sum(each) for each in steps if fits(each, limits)}


@pytest.mark.parametrize("max_model_len", [60, 128, 4096])
def test_steps_run_kernels_of_4_bits_whatever_the_length_of_requests(tmp_path, max_model_len):
    write_checkpoint(tmp_path / "plain", "llama", **WIDE)
    write_quantized(tmp_path / "plain", tmp_path / "stored", FORMATS["awq"])
    config = ModelConfig.from_folder(tmp_path / "stored")
    limits = limits_of(max_model_len=max_model_len)
    steps = all_steps(config, limits, ())
    assert set(PACKED_TOKENS) <= {sum(each) for each in steps if fits(each, limits)}
    assert len(steps) == len(set(steps))


@pytest.mark.parametrize("quantization", [FP8_CONFIG, {"quant_method": "mxfp4"}])
def test_no_steps_are_run_for_products_without_4_bits(tmp_path, quantization):
    write_checkpoint(tmp_path, "llama")
    plain, limits = ModelConfig.from_folder(tmp_path), limits_of()
    quantized = replace(plain, quantization=read_quantization(quantization))
    assert all_steps(quantized, limits, ()) == all_steps(plain, limits, ())


def tokens_run(folder, limits, gates):
    steps = all_steps(ModelConfig.from_folder(folder), limits, gates)
    return {sum(each) for each in steps if fits(each, limits)}


@pytest.mark.parametrize("max_num_batched_tokens", [100, 500, 4096, 8192, 16384])
@pytest.mark.parametrize("num_inputs", [1024, 4096, 5120])
@pytest.mark.parametrize("is_gated", [True, False])
def test_every_way_through_products_of_many_tokens_is_warmed_up(
    tmp_path, is_gated, num_inputs, max_num_batched_tokens, monkeypatch
):
    def tiles(num_outputs, num_tokens):
        sizes = (num_tokens, num_outputs, num_inputs)
        return wide_tiles(*sizes, is_gated=is_gated, dtype=torch.bfloat16, device=CPU)

    use_gpu(monkeypatch)
    monkeypatch.setattr(warm_up, "has_kernels", lambda device: True)
    write_checkpoint(tmp_path, "qwen3")
    limits = limits_of(max_num_batched_tokens=max_num_batched_tokens, max_model_len=4096)
    for num_outputs in (256, 512, 768, 1024, 1408, 2048, 4096, 9728, 12288, 14336, 25600):
        gate = torch.empty(2 * num_outputs, num_inputs, dtype=torch.bfloat16, device="meta")
        counts = tokens_run(tmp_path, limits, [gate] if is_gated else ())
        warmed_up = {tiles(num_outputs, count) for count in counts if count > 64}
        # Choices change only beside multiples of 128.
        ends = {max_num_batched_tokens, *range(128, max_num_batched_tokens, 128)}
        firsts = range(129, max_num_batched_tokens, 128)
        needed = {tiles(num_outputs, count) for count in (65, *ends, *firsts)}
        assert needed <= warmed_up | {None}, num_outputs
    wide_tiles.cache_clear()


def test_gates_of_two_sizes_share_a_step_of_many_tokens(tmp_path, monkeypatch):
    use_gpu(monkeypatch)
    monkeypatch.setattr(warm_up, "has_kernels", lambda device: True)
    write_checkpoint(tmp_path, "qwen3")
    limits = limits_of(max_num_batched_tokens=16384, max_model_len=4096)
    # The shared expert of Qwen3.5-35B-A3B, and one of twice its size.
    gates = [torch.empty(rows, 2048, dtype=torch.bfloat16, device="meta") for rows in (1024, 2048)]
    plain = tokens_run(tmp_path, limits, ())
    assert tokens_run(tmp_path, limits, gates[:1]) - plain == {5376}
    assert tokens_run(tmp_path, limits, gates) - plain == {5376}
    with batch_invariance():
        assert tokens_run(tmp_path, limits, gates) == tokens_run(tmp_path, limits, ())
    wide_tiles.cache_clear()


@pytest.mark.parametrize(("variant", "shapes"), [("qwen3", [(112, 32)]), ("gemma2", [])])
def test_gates_are_weights_of_16_bits_before_silu(tmp_path, variant, shapes):
    write_checkpoint(tmp_path, variant)
    for dtype, expected in ((torch.bfloat16, shapes), (torch.float32, [])):
        model = load_model(tmp_path, device=CPU, dtype=dtype)
        assert [tuple(each.shape) for each in gates_of(model)] == expected


@pytest.mark.parametrize("block_size", [16, 64])
def test_every_way_through_convolutions_is_warmed_up(tmp_path, block_size):
    def form(most_queries):
        return tokens_of_a_program(most_queries), most_queries > MOST_FEW

    write_checkpoint(tmp_path, "qwen3")
    config = ModelConfig.from_folder(tmp_path)
    limits = limits_of(block_size=block_size, state_pages=1)
    warmed_up = {form(max(each)) for each in all_steps(config, limits, ())}
    assert warmed_up == {form(count) for count in range(1, 101)}


def invariant_products():
    """Returns rows and parts of weights: all multiples of 128 rows up to 16384, and larger ones."""
    all_rows = (*range(1024, 16384, 128), *range(16384, 65536, 1024), 128256, 151936)
    return [(rows, parts) for rows in all_rows for parts in (1, 2, 4) if parts == 1 or rows <= 4096]


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 4096, 8192])
@pytest.mark.parametrize("max_model_len", [300, 4096])
@pytest.mark.parametrize(("least", "quantization"), [(65, None), (MOST_PACKED_TOKENS + 1, "awq")])
def test_every_way_through_batch_invariant_products_is_warmed_up(
    tmp_path, monkeypatch, max_num_batched_tokens, max_model_len, least, quantization
):
    use_gpu(monkeypatch)
    write_checkpoint(tmp_path / "plain", "llama", **WIDE)
    if quantization is not None:
        write_quantized(tmp_path / "plain", tmp_path / "stored", FORMATS[quantization])
    stored = tmp_path / ("plain" if quantization is None else "stored")
    limits = limits_of(max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len)
    with batch_invariance():
        steps = all_steps(ModelConfig.from_folder(stored), limits, ())
    sums = [sum(each) for each in steps if fits(each, limits)]
    counts = {count for count in (*sums, max_num_batched_tokens) if count >= least}
    # Choices change only between multiples of 64.
    needed = range(-(-least // 64) * 64, max_num_batched_tokens + 1, 64)
    for product in invariant_products():
        warmed_up = {invariant_wide_tiles(count, *product, device=CPU) for count in counts}
        assert {
            invariant_wide_tiles(count, *product, device=CPU) for count in needed
        } <= warmed_up, product


def test_a_way_that_another_step_goes_gets_no_step_of_its_own(tmp_path):
    write_checkpoint(tmp_path, "qwen3_moe")
    config = replace(ModelConfig.from_folder(tmp_path), num_key_value_heads=8)
    limits = limits_of(max_model_len=4096)
    deepseek = replace(config, moe=replace(config.moe, num_experts=256, num_experts_per_tok=8))
    dense = replace(config, moe=None)
    assert set(early_steps(dense, limits)) <= set(early_steps(deepseek, limits))
    # 1025 tokens are the first with more than 32 rows each; 520 have more than 16.
    assert later_steps(deepseek, limits, ()) == [*later_steps(dense, limits, ()), (1025,)]


@pytest.mark.parametrize("max_num_seqs", [1, 20, 256])
def test_decodes_of_all_experts_are_early_as_far_as_requests_go(tmp_path, max_num_seqs):
    write_checkpoint(tmp_path, "qwen3_moe")
    config = ModelConfig.from_folder(tmp_path)
    moe = replace(config.moe, num_experts=64, num_experts_per_tok=6)
    limits = limits_of(max_num_seqs=max_num_seqs)
    steps = [*FIRST_STEPS, *early_steps(replace(config, moe=moe), limits)]
    decodes = {form(len(each), 64, 6) for each in steps if max(each) == 1 and fits(each, limits)}
    assert decodes == {form(count, 64, 6) for count in range(1, max_num_seqs + 1)}


def fits(q_lens, limits):
    return (
        sum(q_lens) <= limits.max_num_batched_tokens
        and max(q_lens) <= limits.max_model_len
        and len(q_lens) <= limits.max_num_seqs
    )


@pytest.mark.parametrize("changes", [{"num_stages": 2}, {"num_speculative_tokens": 3}], ids=str)
def test_dummy_steps_say_what_a_worker_reads_of_each_step(changes):
    limits = StepLimits(
        max_num_seqs=8,
        max_num_batched_tokens=32,
        max_model_len=64,
        block_size=16,
        vocab_size=97,
        **changes,
    )
    for step in (largest_step(limits), small_step_of_everything(limits)):
        Batch.read(step, limits, num_blocks=1)
