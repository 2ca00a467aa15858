import pytest
import torch

from models.kv_cache import FP8_CACHE_DTYPE, KVCacheSpec, LatentCacheSpec
from models.loading.loader import load_model
from services.engine.batch import read_int32
from services.engine.config.cache import CacheConfig
from services.engine.kv_cache.cache_groups import group_layers
from services.engine.limits import StepLimits
from services.engine.worker.runner.model_runner import ModelRunner
from services.engine.worker.start import kv_memory
from services.engine.worker.start.kv_memory import (
    MAX_BLOCKS_FROM_MEMORY,
    allocate_kv_cache,
    block_bytes,
    check_host_memory,
    choose_num_blocks,
    shared_prefix_tokens,
)
from services.engine.worker.start.warm_up import largest_step
from tests.support.forked_program import run_forked
from tests.support.random_checkpoints import write_checkpoint

CPU = torch.device("cpu")
LIMITS = StepLimits(
    max_num_seqs=8, max_num_batched_tokens=40, max_model_len=16, block_size=4, vocab_size=97
)


def load(tmp_path_factory, variant):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, variant)
    return load_model(folder, device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tmp_path_factory, "qwen3")


def choose(model, **options):
    config = CacheConfig(**options)
    return choose_num_blocks(
        config,
        model,
        limits=LIMITS,
        dtype=torch.float32,
        device=CPU,
        graph_bytes=lambda runner: 0,
    )


def test_the_block_count_asked_for_wins(model):
    assert choose(model, num_kv_blocks=7, kv_cache_memory_mb=1) == 7


def test_memory_on_a_cpu_is_filled_with_blocks(model):
    bytes_each = block_bytes(model, block_size=4, dtype=torch.float32)
    assert choose(model, kv_cache_memory_mb=3) == 3 * 2**20 // bytes_each


@pytest.mark.parametrize("dtype", [torch.float32, FP8_CACHE_DTYPE])
def test_layers_that_cache_other_sizes_share_blocks_of_the_largest(tmp_path_factory, dtype):
    # Two layers with a window cache 4 heads of 8, and two without one head of 16.
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "gemma4", num_key_value_heads=4)
    model = load_model(folder, device=CPU, dtype=torch.float32)
    groups = group_layers(model.config.cache_windows, max_model_len=128)
    shape = {"block_size": 4, "dtype": dtype, "groups": groups}
    caches = allocate_kv_cache(model, num_blocks=6, device=CPU, **shape)
    assert [cache.block_stride for cache in caches] == [1, 2, 1, 2]
    assert {cache.num_blocks for cache in caches} == {6}
    assert [tuple(cache.k.shape) for cache in caches] == [(6, 4, 4, 8), (12, 4, 1, 16)] * 2
    places = {cache.k.data_ptr() for cache in caches}
    assert len(places) == 2
    scales = [cache.k_scale for cache in caches if cache.k_scale is not None]
    num_bytes = 2 * 2 * 6 * 4 * 32 * dtype.itemsize + 2 * sum(4 * each.numel() for each in scales)
    assert 6 * block_bytes(model, **shape) == num_bytes


def test_a_cache_larger_than_the_machine_is_refused_with_numbers():
    check_host_memory(2**30, 2**30)
    message = r"would take 3\.0 GiB, and this process can have 1\.0 GiB more.*--num-kv-blocks"
    with pytest.raises(ValueError, match=message):
        check_host_memory(3 * 2**30, 2**30)


@pytest.mark.parametrize(
    ("flags", "loads_weights"),
    [
        (["--num-kv-blocks", str(2**31 - 1)], True),
        (["--kv-cache-memory-mb", str(10**9)], False),
    ],
)
def test_an_engine_refuses_such_a_cache_without_a_traceback(flags, loads_weights):
    ended = run_forked("services.engine", "--port", "0", "--device", "cpu", *flags)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert "GiB more. Lower --num-kv-blocks" in ended.stderr
    assert ("weights_loaded" in ended.stderr) == loads_weights


def test_blocks_from_memory_stop_where_the_scheduler_would_drown(model):
    assert choose(model, kv_cache_memory_mb=10**7) == MAX_BLOCKS_FROM_MEMORY


def test_block_bytes_are_those_allocated(model):
    caches = allocate_kv_cache(model, num_blocks=5, block_size=4, dtype=torch.bfloat16, device=CPU)
    allocated = sum(cache.k.nbytes + cache.v.nbytes for cache in caches)
    assert allocated == 5 * block_bytes(model, block_size=4, dtype=torch.bfloat16)
    assert len(caches) == model.config.num_hidden_layers


def test_a_cache_of_8_bits_is_a_byte_a_number_and_a_scale_a_head(model):
    caches = allocate_kv_cache(model, num_blocks=5, block_size=4, dtype=FP8_CACHE_DTYPE, device=CPU)
    allocated = sum(tensor.nbytes for cache in caches for tensor in cache.tensors().values())
    bytes_each = block_bytes(model, block_size=4, dtype=FP8_CACHE_DTYPE)
    assert allocated == 5 * bytes_each
    config = model.config
    heads = 2 * config.num_hidden_layers * config.num_key_value_heads
    assert bytes_each == 4 * heads * (config.head_dim + 4)


def test_latent_attention_caches_one_small_vector_a_token(tmp_path_factory):
    model = load(tmp_path_factory, "deepseek_v3")
    caches = allocate_kv_cache(model, num_blocks=5, block_size=4, dtype=torch.float32, device=CPU)
    assert [cache.latent.shape for cache in caches] == [(5, 4, 16)] * 3
    assert [cache.rotated.shape for cache in caches] == [(5, 4, 8)] * 3
    assert block_bytes(model, block_size=4, dtype=torch.float32) == 3 * (16 + 8) * 4 * 4


@pytest.mark.parametrize(("variant", "index"), [("deepseek_v3", 0), ("deepseek_v32", 12 + 4)])
def test_latent_vectors_and_index_keys_of_8_bits_are_a_byte_an_element_and_a_scale(
    variant, index, tmp_path_factory
):
    model = load(tmp_path_factory, variant)
    caches = allocate_kv_cache(model, num_blocks=5, block_size=4, dtype=FP8_CACHE_DTYPE, device=CPU)
    bytes_each = block_bytes(model, block_size=4, dtype=FP8_CACHE_DTYPE)
    assert bytes_each == 4 * 3 * (16 + 4 + 8 * 2 + index)
    allocated = sum(tensor.nbytes for cache in caches for tensor in cache.tensors().values())
    assert allocated == 5 * bytes_each


def test_an_indexer_caches_a_key_a_token(tmp_path_factory):
    model = load(tmp_path_factory, "deepseek_v32")
    cache = allocate_kv_cache(model, num_blocks=5, block_size=4, dtype=torch.float32, device=CPU)[0]
    assert cache.index_keys.shape == (5, 4, 12)
    assert block_bytes(model, block_size=4, dtype=torch.float32) == 3 * (16 + 8 + 12) * 4 * 4


@pytest.mark.parametrize(("dtype", "of_8_bits"), [(torch.float32, 0), (FP8_CACHE_DTYPE, 1)])
def test_an_index_of_blocks_caches_a_key_a_token_without_scales(dtype, of_8_bits, tmp_path_factory):
    model = load(tmp_path_factory, "minimax_m3")
    caches = allocate_kv_cache(model, num_blocks=5, block_size=4, dtype=dtype, device=CPU)
    assert caches[0].index_keys is None
    assert [cache.index_keys.shape for cache in caches[1:]] == [(5, 4, 16)] * 2
    head, key = (16 + 4, 2 * 16) if of_8_bits else (4 * 16, 4 * 16)
    bytes_each = block_bytes(model, block_size=4, dtype=dtype)
    assert bytes_each == 4 * (3 * 2 * 2 * head + 2 * key)
    allocated = sum(tensor.nbytes for cache in caches for tensor in cache.tensors().values())
    assert allocated == 5 * bytes_each


def test_too_little_memory_is_an_error_that_says_what_to_raise(model):
    limits = StepLimits(
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_model_len=2**20,
        block_size=2**20,
        vocab_size=97,
    )
    config = CacheConfig(kv_cache_memory_mb=1)
    with pytest.raises(ValueError, match="kv_cache_memory_mb"):
        choose_num_blocks(
            config,
            model,
            limits=limits,
            dtype=torch.float32,
            device=CPU,
            graph_bytes=lambda runner: 0,
        )


def test_the_largest_step_uses_every_token_and_row_and_runs_without_blocks(model):
    step = largest_step(LIMITS)
    assert step.context.num_tokens == LIMITS.max_num_batched_tokens
    assert step.context.batch_size == LIMITS.max_num_seqs
    assert step.context.max_q_len == LIMITS.max_model_len
    cache = allocate_kv_cache(model, num_blocks=1, block_size=4, dtype=torch.float32, device=CPU)
    runner = ModelRunner(model, cache, limits=LIMITS, device=CPU)
    result = runner.execute(step).message()
    assert len(read_int32(result.token_ids)) == LIMITS.max_num_seqs


LAYER = KVCacheSpec(num_heads=32, num_kv_heads=8, head_dim=128)
HALF = KVCacheSpec(num_heads=16, num_kv_heads=4, head_dim=128)
LATENT = LatentCacheSpec(num_heads=16, latent_dim=512, rope_dim=64)


@pytest.mark.parametrize(
    ("wanted", "specs", "dtype", "expected"),
    [
        (None, [LAYER], torch.bfloat16, 2**15),
        (None, [LAYER, HALF], torch.bfloat16, 2**16),
        (None, [LAYER], FP8_CACHE_DTYPE, -(-(2**27) // 2112)),
        (None, [LATENT], torch.bfloat16, 0),
        (None, [LATENT, LAYER], torch.bfloat16, 2**15),
        (5, [LATENT], torch.bfloat16, 0),
        (5, [LAYER], torch.bfloat16, 5),
        (0, [LAYER], torch.bfloat16, 0),
    ],
)
def test_the_tables_of_a_gpu_say_when_sharing_a_prefix_pays(
    monkeypatch, wanted, specs, dtype, expected
):
    monkeypatch.setattr(kv_memory, "has_kernels", lambda device: True)
    assert shared_prefix_tokens(wanted, specs, dtype=dtype, device=CPU) == expected


@pytest.mark.parametrize(("wanted", "dtype", "shares"), [
    (None, torch.bfloat16, True), (None, FP8_CACHE_DTYPE, False), (7, FP8_CACHE_DTYPE, True),
])  # fmt: skip
def test_drafts_share_prefixes_of_an_8_bit_cache_only_if_asked_for(
    monkeypatch, wanted, dtype, shares
):
    monkeypatch.setattr(kv_memory, "has_kernels", lambda device: True)
    found = shared_prefix_tokens(wanted, [LAYER], dtype=dtype, device=CPU, num_queries=3)
    assert bool(found) == shares


@pytest.mark.parametrize(("wanted", "expected"), [(None, 0), (0, 0), (7, 7)])
def test_on_a_cpu_a_prefix_is_shared_only_if_asked_for(wanted, expected):
    assert shared_prefix_tokens(wanted, [LAYER], dtype=torch.float32, device=CPU) == expected
