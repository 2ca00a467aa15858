"""Attention of batch-invariant mode: a row has the same bits in every kernel and every step."""

from dataclasses import replace

import pytest
import torch

from models.kernels.attention.configurations import (
    PART,
    hopper_tiles,
)
from models.kernels.tuning.hopper import TABLES
from models.kernels.tuning.tiles import AttentionTiles
from tests.support.attention_case import AttentionCase, Heads, make_case
from tests.support.invariance import batch_invariance
from tests.support.tolerances import assert_rows_close

pytestmark = pytest.mark.gpu

HEADS = {
    "qwen3-8b": Heads(num_heads=32, num_kv_heads=8, head_dim=128),
    "gpt-oss": Heads(num_heads=64, num_kv_heads=8, head_dim=64),
    "no-grouping": Heads(num_heads=4, num_kv_heads=4, head_dim=128),
    "group-of-5": Heads(num_heads=10, num_kv_heads=2, head_dim=64),
    "group-of-6": Heads(num_heads=12, num_kv_heads=2, head_dim=128),
    "heads-of-96": Heads(num_heads=8, num_kv_heads=2, head_dim=96),
}
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 33, "has_sinks": True},
    "wide-window": {"sliding_window": 600},
    "chunks": {"sliding_window": -600},
    "sinks": {"has_sinks": True},
    "soft-cap": {"soft_cap": 30.0},
    "steep": {"scale": 1.0},
}
LENGTH = 1300
SPANS = [(0, 1300), (0, 1), (0, 77), (500, 700), (511, 513), (512, 530), (640, 641), (1299, 1300)]
STEPS = {
    "single tokens": [(n, n + 1) for n in (0, 5, 127, 128, 511, 512, 513, 1023, 1024, 1299)],
    "many single tokens": [(n, n + 1) for n in range(0, LENGTH, 4)],
    "drafts": [(n, n + 3) for n in (0, 126, 509, 511, 1290)],
    "chunks": [(0, 300), (300, 301), (301, 303), (303, 1020), (1020, 1021), (1021, 1300)],
    "many chunks": [(n, n + n % 7 + 1) for n in range(0, 1290, 9)],
}


@pytest.fixture(autouse=True)
def _mode():
    with batch_invariance():
        yield


def make_sequence(heads: Heads, dtype=torch.bfloat16, **options) -> AttentionCase:
    """Returns a prompt of LENGTH tokens in one chunk."""
    options = {"has_rotation": False, "device": "cuda", **options}
    return make_case([LENGTH], [LENGTH], heads, dtype=dtype, **options)


def step_of(whole: AttentionCase, spans) -> AttentionCase:
    """Returns a step whose requests compute these tokens of the sequence, each after its prefix."""
    lengths = [end - start for start, end in spans]
    tokens = torch.cat([torch.arange(*span, device="cuda") for span in spans])
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    metadata = replace(
        whole.metadata,
        query_start_loc=starts,
        seq_lens=torch.tensor([end for _, end in spans], dtype=torch.int32, device="cuda"),
        row_ids=torch.zeros(len(spans), dtype=torch.int32, device="cuda"),
        block_tables=whole.metadata.block_tables.repeat(len(spans), 1),
        slot_mapping=whole.metadata.slot_mapping[tokens],
        max_seqlen_q=max(lengths),
    )
    q, k, v = (x[tokens] for x in (whole.q, whole.k, whole.v))
    return replace(whole, q=q, k=k, v=v, positions=whole.positions[tokens], metadata=metadata)


def check(whole: AttentionCase, steps) -> None:
    """Fails unless every step has the bits of the sequence in one chunk."""
    expected = whole.run()
    assert_rows_close(expected, whole.exact().run())
    for spans in steps:
        output = step_of(whole, spans).run()
        rows = torch.cat([expected[start:end] for start, end in spans])
        same = (output == rows).flatten(1).all(1)
        assert same.all(), (spans[:8], (~same).nonzero().flatten()[:8].tolist())
        assert whole.metadata.workspace.counters.count_nonzero() == 0


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_row_has_the_same_bits_wherever_a_prompt_is_cut(heads, options):
    check(make_sequence(heads, **options), [[span] for span in SPANS])


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("spans", STEPS.values(), ids=STEPS)
def test_a_row_has_the_same_bits_beside_others(heads, options, spans):
    check(make_sequence(heads, **options), [spans])


@pytest.mark.parametrize("length", [100 * PART - 3, 150 * PART + 1])
@pytest.mark.parametrize("heads", [HEADS["qwen3-8b"], HEADS["group-of-5"]], ids=["8b", "of-5"])
def test_more_parts_than_programs_have_the_same_bits(heads, length):
    options = {"dtype": torch.bfloat16, "device": "cuda", "has_rotation": False}
    case = make_case([3], [length], heads, **options)
    expected = case.run()
    assert torch.equal(case.unsplit().run(), expected)
    for last in range(3):
        single = replace(
            case,
            q=case.q[last : last + 1],
            k=case.k[last : last + 1],
            v=case.v[last : last + 1],
            positions=case.positions[last : last + 1],
            metadata=replace(
                case.metadata,
                query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
                seq_lens=case.metadata.seq_lens - 2 + last,
                slot_mapping=case.metadata.slot_mapping[last : last + 1],
                max_seqlen_q=1,
            ),
        )
        assert torch.equal(single.run()[0], expected[last])
    assert case.metadata.workspace.counters.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_have_the_same_bits(dtype):
    check(make_sequence(HEADS["qwen3-8b"], dtype=dtype), STEPS.values())


def test_an_8_bit_cache_has_the_same_bits():
    whole = make_sequence(HEADS["qwen3-8b"], has_fp8_cache=True)
    expected = whole.run()
    for spans in STEPS.values():
        rows = torch.cat([expected[start:end] for start, end in spans])
        assert torch.equal(step_of(whole, spans).run(), rows)


@pytest.mark.parametrize("keys", [16, 32, 128])
@pytest.mark.parametrize("options", ["plain", "window", "steep"])
def test_the_keys_of_a_tile_do_not_decide_the_bits(keys, options):
    from models.kernels.attention.invariant.invariant_parts import attend_parts

    whole = make_sequence(HEADS["qwen3-8b"], **OPTIONS[options])
    expected = whole.run()
    spans = STEPS["many single tokens"]
    step = step_of(whole, spans)
    tiles = AttentionTiles(rows=16, keys=keys, num_warps=1, num_stages=2, is_exact=True)
    output = torch.empty_like(step.q)
    attend_parts(
        step.q, output, step.cache, step.metadata, tiles, skips_longer=False,
        sliding_window=step.sliding_window, sinks=step.sinks,
        scale=step.scale or step.q.shape[2] ** -0.5, soft_cap=0.0,
    )  # fmt: skip
    assert torch.equal(output, expected[[start for start, _ in spans]])


@pytest.mark.parametrize("block_size", [8, 64, 256])
def test_blocks_of_any_size_have_the_same_bits(block_size):
    check(make_sequence(HEADS["qwen3-8b"], block_size=block_size), STEPS.values())


def test_values_after_the_end_of_a_sequence_are_not_read():
    whole = make_sequence(HEADS["qwen3-8b"])
    expected = whole.run()
    slots = whole.metadata.slot_mapping
    for stored in (whole.cache.k, whole.cache.v):
        is_owned = torch.zeros(stored.shape[:2], dtype=torch.bool, device="cuda")
        is_owned[0] = True
        is_owned.view(-1)[slots] = True
        stored[~is_owned] = torch.nan
    for spans in ([(1100, 1300)], STEPS["many single tokens"]):
        rows = torch.cat([expected[start:end] for start, end in spans])
        assert torch.equal(step_of(whole, spans).run(), rows)


@pytest.mark.parametrize("heads", ["qwen3-8b", "gpt-oss", "no-grouping"])
@pytest.mark.parametrize("options", ["plain", "window", "wide-window"])
@pytest.mark.parametrize("most_pairs", [TABLES.many_pairs, TABLES.most_pairs, 1000])
def test_the_kernel_for_hopper_has_the_bits_of_the_others(heads, options, most_pairs):
    whole = make_sequence(HEADS[heads], **OPTIONS[options])
    num_kv_heads = whole.cache.k.shape[2]
    tiles = hopper_tiles(whole.q, whole.cache.k.dtype, 16, num_kv_heads, has_parts=True)
    if tiles is None:
        pytest.skip("needs a GPU of compute capability 9.0")
    from models.kernels.attention.prefill.hopper_attention import hopper_attention

    spans = [(n, n + 1) for n in range(0, LENGTH, 1 + LENGTH * num_kv_heads // most_pairs)]
    step = step_of(whole, spans)
    for pairs in (TABLES.many_pairs, TABLES.most_pairs):
        assert (len(spans) * num_kv_heads > pairs) == (most_pairs > pairs)
    output = step.run()
    other = torch.empty_like(output)
    hopper_attention(
        step.q, step.k, step.v, step.cache, step.metadata, other,
        step.metadata.workspace.counters, tiles, min_queries=1,
        sliding_window=step.sliding_window, sinks=step.sinks,
        output_scale=None, scale=step.q.shape[2] ** -0.5, part=PART,
    )  # fmt: skip
    assert torch.equal(output, other)
