from functools import partial

import pytest
import torch

from models.forward_context import AttentionWorkspace
from models.kernels.attention import configurations
from models.kernels.attention.configurations import (
    LANES,
    MAX_PARTIALS,
    PART,
    hopper_tiles,
    least_part,
    num_dealt,
    num_splits,
    prefill_tiles,
)
from models.kernels.tuning.hopper import TABLES
from models.kernels.tuning.tiles import MAX_SPLITS
from tests.support.gpu_facts import use_gpu

CPU = torch.device("cpu")
decode_tiles = partial(configurations.decode_tiles, device=CPU)
invariant_tiles = partial(configurations.invariant_tiles, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256, 512])
def test_every_supported_head_has_tiles_that_tensor_cores_take(monkeypatch, dtype, head_dim):
    prefill_tiles.cache_clear()
    use_gpu(monkeypatch)
    device = torch.device("cuda")
    prefill = [
        prefill_tiles(dtype, head_dim, has_prefix=prefix, device=device) for prefix in (False, True)
    ]
    decode, flat = (
        [
            decode_tiles(dtype, cache, head_dim, num_requests=count, num_heads=32, num_kv_heads=8)
            for count in (None, 1, 16, 64, 10_000)
        ]
        for cache in (dtype, torch.float8_e4m3fn)
    )
    invariant = [
        invariant_tiles(dtype, dtype, head_dim, num_pairs=num_pairs) for num_pairs in (1, 10_000)
    ]
    for tiles in (*decode, *prefill, *invariant):
        assert min(tiles.rows, tiles.keys) >= 16
    # With keys as rows, queries are columns.
    assert all(tiles.rows >= 8 and tiles.keys >= 16 for tiles in flat)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256, 512])
def test_batch_invariant_kernels_share_what_decides_bits(monkeypatch, dtype, cache_dtype, head_dim):
    use_gpu(monkeypatch, anywhere=True)
    cache_dtype = cache_dtype or dtype
    all_tiles = [
        invariant_tiles(dtype, cache_dtype, head_dim, num_pairs=num_pairs)
        for num_pairs in (1, TABLES.many_pairs + 1, TABLES.most_pairs + 1)
    ]
    if cache_dtype.itemsize == 1:
        assert len(set(all_tiles)) == 1
    q = torch.empty(1, 32, head_dim, dtype=dtype)
    hopper = hopper_tiles(q, cache_dtype, 16, num_kv_heads=8, has_parts=True)
    if hopper is not None:
        all_tiles.append(hopper)
    assert len({tiles.is_exact for tiles in all_tiles}) == 1
    # Weights in float16 round where they are small, so tiles must meet the same highest scores.
    if dtype is not torch.bfloat16 or not all_tiles[0].is_exact:
        assert len({tiles.keys for tiles in all_tiles}) == 1
    assert all(PART % tiles.keys == 0 for tiles in all_tiles)
    if all_tiles[0].is_exact:
        assert all(tiles.keys % LANES == 0 for tiles in all_tiles)


def test_keys_are_shared_by_no_fewer_programs_than_there_are_requests():
    for num_requests in range(1, 2000):
        tiles = decode_tiles(
            torch.bfloat16,
            torch.bfloat16,
            128,
            num_requests=num_requests,
            num_heads=4,
            num_kv_heads=1,
        )
        assert tiles.num_programs == 0 or tiles.num_programs >= num_requests


def dealt_of(num_requests, num_kv_heads, *, dtype=torch.bfloat16, cache_dtype=None, head_dim=128):
    heads = {"num_heads": 4 * num_kv_heads, "num_kv_heads": num_kv_heads}
    cache_dtype = cache_dtype or dtype
    tiles = decode_tiles(dtype, cache_dtype, head_dim, num_requests=num_requests, **heads)
    return num_dealt(workspace_of(**heads), num_requests, num_kv_heads, tiles, window=0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 7, 8, 32, 64])
def test_parts_are_dealt_from_few_requests_on(num_kv_heads):
    for num_requests in range(1, 600):
        pairs = num_requests * num_kv_heads
        assert (dealt_of(num_requests, num_kv_heads) > 0) == (num_requests > 4 and pairs > 16)
        assert (dealt_of(num_requests, num_kv_heads, head_dim=256) > 0) == (pairs > 256)
        assert dealt_of(num_requests, num_kv_heads, dtype=torch.float32) == 0


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 7, 8, 32, 64])
def test_parts_of_an_fp8_cache_are_dealt_from_few_requests_on(num_kv_heads, head_dim):
    options = {"cache_dtype": torch.float8_e4m3fn, "head_dim": head_dim}
    for num_requests in range(1, 600):
        is_dealt = num_requests > 4 and num_requests * num_kv_heads > 16
        assert (dealt_of(num_requests, num_kv_heads, **options) > 0) == is_dealt
        assert dealt_of(num_requests, num_kv_heads, dtype=torch.float32, **options) == 0


@pytest.mark.parametrize("group", [1, 4, 8, 16, 32])
def test_steps_whose_parts_are_not_dealt_have_short_ones_of_an_fp8_cache(group):
    heads = {"num_heads": 32 * group, "num_kv_heads": 32}
    tiles = decode_tiles(torch.bfloat16, torch.float8_e4m3fn, 128, num_requests=4, **heads)
    assert least_part(tiles) == tiles.keys


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 7, 8, 32, 64])
def test_parts_are_dealt_beside_chunks(num_kv_heads, head_dim, cache_dtype):
    assert dealt_of(None, num_kv_heads, head_dim=head_dim, cache_dtype=cache_dtype) > 0


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (16, 128), (17, 64), (4, 256)])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 7, 8, 32, 64])
def test_results_of_dealt_parts_never_outgrow_their_workspace(
    num_kv_heads, group, head_dim, cache_dtype
):
    heads = {"num_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads}
    for num_requests in range(1, 600):
        tiles = decode_tiles(
            torch.bfloat16, cache_dtype, head_dim, num_requests=num_requests, **heads
        )
        requests = (workspace_of(**heads), num_requests, num_kv_heads, tiles)
        dealt = num_dealt(*requests, window=0)
        # Each part that is not a sequence's first comes with at most one that is.
        assert 2 * dealt * num_kv_heads <= MAX_PARTIALS
        # A window of one part has nothing to deal.
        assert num_dealt(*requests, window=least_part(tiles)) == 0
        assert num_dealt(*requests, window=10_000) == dealt
        assert num_dealt(None, *requests[1:], window=0) == 0


@pytest.mark.parametrize(("num_heads", "held"), [(16, 256), (32, 128)])
def test_a_lone_request_holds_fewer_keys_if_a_large_product_follows(num_heads, held):
    tiles = decode_tiles(
        torch.bfloat16,
        torch.bfloat16,
        128,
        num_requests=1,
        num_heads=num_heads,
        num_kv_heads=8,
    )
    assert tiles.held_keys == held


@pytest.mark.parametrize("num_requests", [1, 4, 32])
@pytest.mark.parametrize(("window", "is_held"), [(1, True), (128, True), (129, False), (0, False)])
def test_a_short_window_is_held_and_not_split(num_requests, window, is_held):
    heads = {"num_heads": 64, "num_kv_heads": 8}
    tiles = decode_tiles(
        torch.bfloat16, torch.bfloat16, 64, num_requests=num_requests, window=window, **heads
    )
    requests = (workspace_of(64, 8), num_requests)
    splits = num_splits(*requests, *heads.values(), torch.bfloat16, tiles)
    dealt = num_dealt(*requests, 8, tiles, window=window)
    assert (tiles.most_partials == 1) == is_held
    assert not is_held or (splits == 1 and dealt == 0 and tiles.held_keys >= window)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_few_requests_hold_keys_and_make_fewer_partial_results(cache_dtype):
    heads = {"num_heads": 32, "num_kv_heads": 8}
    workspace = workspace_of(**heads)
    for num_requests in range(1, 65):
        tiles = decode_tiles(torch.bfloat16, cache_dtype, 128, num_requests=num_requests, **heads)
        splits = num_splits(workspace, num_requests, *heads.values(), cache_dtype, tiles)
        # Beyond the last of these, more programs run at once.
        most = 512
        if num_requests <= (4 if cache_dtype.itemsize == 1 else 8):
            assert tiles.held_keys > 0
            most = 512 if cache_dtype.itemsize == 1 else 384
        elif cache_dtype.itemsize == 1 and num_requests > 8:
            most = 1024
        if cache_dtype.itemsize == 1 and num_requests == 1:
            most = 256
        assert splits == min(tiles.most_splits, most // (8 * num_requests))


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 1024), (torch.float64, 64)])
def test_unsupported_heads_are_refused_by_name(dtype, head_dim):
    with pytest.raises(ValueError, match=f"no kernel for heads of {head_dim} {dtype}"):
        decode_tiles(dtype, dtype, head_dim, num_requests=1, num_heads=8, num_kv_heads=8)


@pytest.mark.parametrize("beside_chunks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (6, 2), (20, 1), (2, 2)])
def test_partial_results_never_outgrow_their_workspace(
    num_heads, num_kv_heads, dtype, beside_chunks
):
    workspace = workspace_of(num_heads, num_kv_heads)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}

    def splits_of(num_requests, workspace=workspace):
        q_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
        tiles = decode_tiles(q_dtype, dtype, 128, num_requests=num_requests, **heads)
        return num_splits(
            workspace,
            num_requests,
            *heads.values(),
            dtype,
            tiles,
            beside_chunks=beside_chunks,
        )

    for num_requests in range(1, 600):
        splits = splits_of(num_requests)
        assert 1 <= splits <= 48
        if splits > 1:
            assert num_requests * num_heads * splits <= workspace.lse.numel()
            assert num_requests * num_kv_heads <= MAX_PARTIALS
    assert splits_of(1) >= MAX_SPLITS
    assert splits_of(1, workspace=None) == 1


def workspace_of(num_heads, num_kv_heads):
    return AttentionWorkspace(
        partials=torch.empty(0),
        lse=torch.empty(MAX_PARTIALS * (num_heads // num_kv_heads)),
        counters=torch.empty(MAX_PARTIALS),
    )


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype", "cache_dtype", "block_size", "is_taken"),
    [
        (32, 128, torch.bfloat16, torch.bfloat16, 16, True),
        (8, 64, torch.float16, torch.float16, 8, True),
        (32, 96, torch.bfloat16, torch.bfloat16, 16, False),
        (32, 128, torch.float32, torch.float32, 16, False),
        (32, 128, torch.bfloat16, torch.float8_e4m3fn, 16, False),
        (32, 128, torch.bfloat16, torch.bfloat16, 4, False),
        (32, 128, torch.bfloat16, torch.bfloat16, 24, False),
        (65 * 8, 128, torch.bfloat16, torch.bfloat16, 16, False),
    ],
)
def test_the_kernel_for_hopper_takes_what_its_copies_take(
    monkeypatch, num_heads, head_dim, dtype, cache_dtype, block_size, is_taken
):
    q = torch.empty(1, num_heads, head_dim, dtype=dtype)
    for capability in ((9, 0), (8, 0), (10, 0)):
        use_gpu(monkeypatch, capability, anywhere=True)
        tiles = hopper_tiles(q, cache_dtype, block_size, num_kv_heads=8)
        assert (tiles is not None) == (is_taken and capability == (9, 0))
