"""Attention of chunks against the float64 reference, where the kernel for Hopper GPUs runs."""

from dataclasses import replace

import pytest
import torch

from models.kernels.attention.configurations import hopper_tiles
from tests.support.attention_case import AttentionCase, Heads, make_case
from tests.support.tolerances import assert_rows_close

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
HEADS = {
    "qwen3-8b": Heads(num_heads=32, num_kv_heads=8, head_dim=128),
    "qwen3-0.6b": Heads(num_heads=16, num_kv_heads=8, head_dim=128),
    "gpt-oss": Heads(num_heads=64, num_kv_heads=8, head_dim=64),
    "group-of-3": Heads(num_heads=6, num_kv_heads=2, head_dim=64),
    "group-of-5": Heads(num_heads=10, num_kv_heads=2, head_dim=128),
    "group-of-7": Heads(num_heads=14, num_kv_heads=2, head_dim=64),
    "group-of-12": Heads(num_heads=24, num_kv_heads=2, head_dim=128),
    "no-grouping": Heads(num_heads=2, num_kv_heads=2, head_dim=64),
    "one-kv-head": Heads(num_heads=64, num_kv_heads=1, head_dim=128),
    "qwen3.5": Heads(num_heads=16, num_kv_heads=2, head_dim=256),
    "group-of-6": Heads(num_heads=12, num_kv_heads=2, head_dim=256),
}
QWEN3_8B = HEADS["qwen3-8b"]
OF_GROUPS = {
    name: HEADS[name] for name in ("qwen3-8b", "gpt-oss", "group-of-7", "group-of-12", "qwen3.5")
}
"""Groups of a power of two, one that is padded and one that is packed."""
ODD_LENGTHS = [2, 7, 31, 32, 33, 127, 128, 129, 257, 640]
BATCHES = {
    "first-chunks": (ODD_LENGTHS, ODD_LENGTHS),
    "later-chunks": (ODD_LENGTHS, [n + 16 * i + 1 for i, n in enumerate(ODD_LENGTHS)]),
    "mixed": ([1, 300, 1, 33, 128, 2, 1, 500], [40, 300, 1, 1033, 1000, 700, 129, 513]),
    "one": ([1025], [1025]),
    "many-absent": (
        [0] * 9 + [77] + [0] * 290 + [1, 40, 0],
        [0] * 9 + [78] + [0] * 290 + [20, 40, 0],
    ),
}


def run(case: AttentionCase) -> torch.Tensor:
    """Runs a case that the kernel for Hopper GPUs takes."""
    block_size, num_kv_heads = case.cache.k.shape[1:3]
    if hopper_tiles(case.q, case.q.dtype, block_size, num_kv_heads) is None:
        pytest.skip("needs a GPU of compute capability 9.0")
    output = case.run()
    assert case.metadata.workspace.counters.count_nonzero() == 0
    return output


def check(case: AttentionCase) -> None:
    expected = case.exact().run()
    case.leave_window()
    # Values of dummy tokens may be NaN; the null block's are finite.
    for stored in (case.cache.k, case.cache.v):
        is_owned = torch.zeros(stored.shape[:2], dtype=torch.bool, device=stored.device)
        is_owned[0] = True
        lengths = case.metadata.seq_lens.tolist()
        for row, length in zip(case.metadata.block_tables, lengths, strict=True):
            keys = torch.arange(length, device=stored.device)
            is_owned[row[keys // stored.shape[1]].long(), keys % stored.shape[1]] = True
        stored[~is_owned] = torch.nan
    assert_rows_close(run(case), expected)


@pytest.mark.parametrize("sliding_window", [None, 50])
@pytest.mark.parametrize("heads", [QWEN3_8B, HEADS["qwen3.5"]], ids=["qwen3-8b", "qwen3.5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_of_images_see_each_other(heads, sliding_window, dtype):
    images = [(1, 5, 261), (3, 1001, 1030), (4, 900, 1000), (7, 100, 513)]
    case = make_case(
        *BATCHES["mixed"], heads, dtype=dtype, device="cuda", sliding_window=sliding_window,
        images=images,
    )  # fmt: skip
    expected = case.exact().run()
    case.leave_window()
    assert_rows_close(case.run(), expected)


LONG_BATCHES = {
    "draft": ([5], [9005]),
    "drafts": ([3] * 6, [16003, 700, 1030, 3, 5000, 1027]),
    "chunk": ([200], [5200]),
    "mixed": ([1, 4, 150, 0, 33], [40, 12000, 150, 0, 2056]),
}
"""Few queries after many keys."""


@pytest.fixture
def parts(monkeypatch):
    """The parts of each split tile of every step."""
    kernels = pytest.importorskip("models.kernels.attention.prefill.prefill_attention")
    hopper = pytest.importorskip("models.kernels.attention.prefill.hopper_attention")
    noted, add = [], hopper.add_parts

    def add_parts(q, output, shared, **options):
        add(q, output, shared, **options)
        lines = shared.plan[1 : 1 + shared.plan[0, 0]] if shared.num_shares > 0 else ()
        noted.append([line[0] for line in (lines.tolist() if len(lines) else []) if line[0] > 0])

    for module in (kernels, hopper):
        monkeypatch.setattr(module, "add_parts", add_parts)
    return noted


@pytest.mark.parametrize("options", [{}, {"sliding_window": 4000, "has_sinks": True}], ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", LONG_BATCHES.values(), ids=LONG_BATCHES)
def test_programs_share_the_keys_of_few_tiles(batch, heads, options, parts):
    check(make_case(*batch, heads, dtype=torch.bfloat16, device="cuda", **options))
    # 32 kv heads fill the GPU without parts.
    assert len(parts) == 1
    assert all(number > 1 for number in parts[0])
    assert len(parts[0]) > 0 or batch == LONG_BATCHES["chunk"]


@pytest.mark.parametrize("options", [{}, {"sliding_window": 1500, "has_sinks": True}], ids=str)
@pytest.mark.parametrize("head_dim", [96, 192, 512])
@pytest.mark.parametrize("batch", LONG_BATCHES.values(), ids=LONG_BATCHES)
def test_programs_share_the_keys_of_tiles_with_other_heads(batch, head_dim, options, parts):
    heads = Heads(num_heads=8, num_kv_heads=4, head_dim=head_dim)
    case = make_case(*batch, heads, dtype=torch.bfloat16, device="cuda", **options)
    assert_rows_close(case.run(), case.exact().run())
    assert len(parts) == 1
    assert max(parts[0]) > 1


def test_shared_tiles_repeat_bit_for_bit(parts):
    case = make_case(*LONG_BATCHES["drafts"], QWEN3_8B, dtype=torch.bfloat16, device="cuda")
    output = run(case)
    for _ in range(20):
        assert torch.equal(run(case), output)
    assert all(len(each) > 0 for each in parts)


@DTYPES
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_chunks_are_the_references_at_any_length(batch, heads, dtype):
    check(make_case(*batch, heads, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("sliding_window", [1, 33, 128, 5000, -33, -1000])
@pytest.mark.parametrize("heads", OF_GROUPS.values(), ids=OF_GROUPS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_windows_and_sinks(batch, heads, sliding_window):
    options = {"sliding_window": sliding_window, "has_sinks": True}
    check(make_case(*batch, heads, dtype=torch.bfloat16, device="cuda", **options))


@pytest.mark.parametrize("block_size", [8, 32, 128, 256])
def test_blocks_of_a_power_of_two(block_size):
    batch = BATCHES["mixed"]
    check(make_case(*batch, QWEN3_8B, dtype=torch.bfloat16, device="cuda", block_size=block_size))


@pytest.mark.parametrize("heads", OF_GROUPS.values(), ids=OF_GROUPS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_chunks_repeat_bit_for_bit(batch, heads):
    case = make_case(*batch, heads, dtype=torch.bfloat16, device="cuda")
    output = run(case)
    for _ in range(20):
        assert torch.equal(run(case), output)


def test_more_work_than_a_gpu_has_multiprocessors_is_all_done():
    query_lens = [1 + 37 * request % 300 for request in range(60)]
    seq_lens = [n + 100 * (n % 2) for n in query_lens]
    check(make_case(query_lens, seq_lens, QWEN3_8B, dtype=torch.bfloat16, device="cuda"))


def test_dummy_chunks_disturb_no_request():
    case = make_case([40, 300, 5], [40, 300, 5], QWEN3_8B, dtype=torch.bfloat16, device="cuda")
    expected = run(case)
    case.metadata.seq_lens[::2] = 0
    assert torch.equal(run(case)[40:340], expected[40:340])


@pytest.mark.parametrize("room", [2**28, 50 * 2**16], ids=["room", "little-room"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 33, "has_sinks": True}], ids=str)
@pytest.mark.parametrize("heads", OF_GROUPS.values(), ids=OF_GROUPS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_chunks_read_copies_of_a_cache_of_8_bits(monkeypatch, batch, heads, options, room):
    widened_cache = pytest.importorskip("models.kernels.attention.prefill.widened_cache")
    monkeypatch.setattr(widened_cache, "_MOST_BYTES", room)
    options = {"dtype": torch.bfloat16, "device": "cuda", "has_fp8_cache": True, **options}
    case = make_case(*batch, heads, **options)
    case.leave_window()
    output = run(case)
    assert_rows_close(output, case.exact_reading().run())


@pytest.mark.parametrize("heads", OF_GROUPS.values(), ids=OF_GROUPS)
@pytest.mark.parametrize("has_fp8_cache", [False, True], ids=["plain", "fp8-cache"])
def test_where_a_prompt_is_cut_changes_no_bit(has_fp8_cache, heads):
    options = {"dtype": torch.bfloat16, "device": "cuda", "has_rotation": False}
    options["has_fp8_cache"] = has_fp8_cache
    whole = make_case([700], [700], heads, **options)
    expected = run(whole)
    metadata = replace(
        whole.metadata,
        query_start_loc=torch.tensor([0, 200], dtype=torch.int32, device="cuda"),
        slot_mapping=whole.metadata.slot_mapping[500:],
        max_seqlen_q=200,
    )
    later = replace(
        whole,
        q=whole.q[500:],
        k=whole.k[500:],
        v=whole.v[500:],
        positions=whole.positions[500:],
        metadata=metadata,
    )
    assert torch.equal(run(later), expected[500:])
