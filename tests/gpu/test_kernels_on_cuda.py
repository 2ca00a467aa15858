"""The kernels against float64 references: every dtype, odd shapes, and replay in a graph."""

from pathlib import Path

import pytest
import torch
import triton

from models.forward_context import forward_context
from models.kernels.elementwise.add_gated import add_gated
from models.ops.elementwise.gated_rms_norm import gated_rms_norm
from models.ops.elementwise.local_embedding import local_embedding
from models.ops.elementwise.rms_norm import add_rms_norm, rms_norm
from models.ops.elementwise.rotary import rotary
from models.ops.elementwise.sigmoid_gate import sigmoid_gate
from models.ops.elementwise.silu_and_mul import silu_and_mul
from tests.support.attention_case import AttentionCase, Heads, exact_cache, make_case
from tests.support.step_driver import StepDriver
from tests.support.tolerances import FP8_ROW_TOLERANCE, ROW_TOLERANCE, assert_rows_close

pytestmark = pytest.mark.gpu

TINY_CHECKPOINT = Path(__file__).parents[2] / "models" / "checkpoints" / "tiny"

DTYPES = pytest.mark.parametrize("dtype", ROW_TOLERANCE, ids=str)
QWEN3_8B = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
QWEN3_0_6B = Heads(num_heads=16, num_kv_heads=8, head_dim=128)
TINY = Heads(num_heads=6, num_kv_heads=2, head_dim=32)
GPT_OSS = Heads(num_heads=64, num_kv_heads=8, head_dim=64)
ODD = Heads(num_heads=9, num_kv_heads=3, head_dim=12)
HEADS = {
    "qwen3-8b": QWEN3_8B,
    "qwen3-0.6b": QWEN3_0_6B,
    "tiny": TINY,
    "odd": ODD,
    "no-grouping": Heads(num_heads=2, num_kv_heads=2, head_dim=64),
    "one-kv-head": Heads(num_heads=20, num_kv_heads=1, head_dim=80),
    "wide": Heads(num_heads=8, num_kv_heads=2, head_dim=256),
}
DECODES = [1, 7, 16, 17, 127, 128, 129, 1000, 2049]
# Enough that with 8 kv heads a step has the tiles of many requests; fewer have others.
MANY_DECODES = [1 + 37 * request % 700 for request in range(100)]
MIXED = ([1, 7, 127, 1, 128, 129, 1, 33], [1, 7, 127, 300, 128, 1153, 17, 1000])

BATCHES = {
    "mixed": MIXED,
    "decode": ([1] * len(DECODES), DECODES),
    "many": ([1] * len(MANY_DECODES), MANY_DECODES),
}


def check(case: AttentionCase) -> None:
    exact = case.exact()
    expected = exact.run()
    case.leave_window()
    actual = case.run()
    assert_rows_close(actual, expected)
    # Block 0 is the null block; nothing reads it.
    assert_rows_close(case.cache.k[1:], exact.cache.k[1:])
    assert torch.equal(case.cache.v[1:].double().cpu(), exact.cache.v[1:])
    assert case.metadata.workspace.counters.count_nonzero() == 0


def check_with_fp8_cache(case: AttentionCase) -> None:
    exact = case.exact()
    exact.run()
    actual = case.run()
    assert_rows_close(actual, case.exact_reading().run())
    stored = exact_cache(case.cache)
    assert_rows_close(stored.k[1:], exact.cache.k[1:], FP8_ROW_TOLERANCE)
    assert_rows_close(stored.v[1:], exact.cache.v[1:], FP8_ROW_TOLERANCE)
    assert case.metadata.workspace.counters.count_nonzero() == 0


@DTYPES
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_attention_reads_and_writes_a_cache_of_8_bits(batch, heads, dtype):
    check_with_fp8_cache(make_case(*batch, heads, dtype=dtype, device="cuda", has_fp8_cache=True))


@DTYPES
@pytest.mark.parametrize(
    "options",
    [{"sliding_window": 33, "has_sinks": True}, {"has_rotation": False}, {"block_size": 24}],
    ids=str,
)
@pytest.mark.parametrize("batch", [MIXED, ([1] * len(DECODES), DECODES)], ids=["mixed", "decode"])
def test_any_kind_of_attention_takes_a_cache_of_8_bits(batch, options, dtype):
    case = make_case(*batch, GPT_OSS, dtype=dtype, device="cuda", has_fp8_cache=True, **options)
    check_with_fp8_cache(case)


@DTYPES
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_decode_is_the_references_at_any_length(heads, dtype):
    check(make_case([1] * len(DECODES), DECODES, heads, dtype=dtype, device="cuda"))


@DTYPES
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("num_requests", [3, 20, 50, 100])
def test_decode_of_many_requests_is_the_references(num_requests, heads, dtype):
    seq_lens = MANY_DECODES[-num_requests:]
    check(make_case([1] * num_requests, seq_lens, heads, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("num_requests", [1, 3, 20, 50])
def test_decode_of_few_requests_repeats_bit_for_bit(num_requests):
    seq_lens = [1 + 997 * request % 3000 for request in range(num_requests)]
    case = make_case([1] * num_requests, seq_lens, QWEN3_8B, dtype=torch.bfloat16, device="cuda")
    output = case.run()
    for _ in range(20):
        assert torch.equal(case.run(), output)


@DTYPES
@pytest.mark.parametrize("sliding_window", [None, 33, -33])
def test_decode_of_many_requests_takes_windows_sinks_and_any_block_size(sliding_window, dtype):
    options = {"sliding_window": sliding_window, "has_sinks": True, "block_size": 24}
    batch = ([1] * len(MANY_DECODES), MANY_DECODES)
    check(make_case(*batch, GPT_OSS, dtype=dtype, device="cuda", **options))


def test_decode_of_many_requests_repeats_bit_for_bit():
    batch = ([1] * len(MANY_DECODES), MANY_DECODES)
    case = make_case(*batch, QWEN3_8B, dtype=torch.bfloat16, device="cuda")
    output = case.run()
    for _ in range(20):
        assert torch.equal(case.run(), output)


@DTYPES
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_mixed_batches_are_the_references(heads, dtype):
    check(make_case(*MIXED, heads, dtype=dtype, device="cuda"))


@DTYPES
@pytest.mark.parametrize("block_size", [1, 4, 24, 64])
def test_any_block_size(block_size, dtype):
    check(make_case(*MIXED, QWEN3_0_6B, dtype=dtype, device="cuda", block_size=block_size))


@DTYPES
@pytest.mark.parametrize("sliding_window", [1, 33, 128, 5000, -1, -33, -128])
@pytest.mark.parametrize("batch", [MIXED, ([1] * len(DECODES), DECODES)], ids=["mixed", "decode"])
def test_windows_and_sinks(batch, sliding_window, dtype):
    options = {"sliding_window": sliding_window, "has_sinks": True}
    check(make_case(*batch, GPT_OSS, dtype=dtype, device="cuda", **options))


@DTYPES
@pytest.mark.parametrize("options", [{"has_norm": False}, {"has_rotation": False}], ids=str)
def test_norm_and_rotation_are_optional(options, dtype):
    check(make_case(*MIXED, TINY, dtype=dtype, device="cuda", **options))


@DTYPES
@pytest.mark.parametrize("num_requests", [1, 2, 40, 200])
def test_long_and_short_sequences_side_by_side(num_requests, dtype):
    seq_lens = [20000] + [5] * (num_requests - 1)
    check(make_case([1] * num_requests, seq_lens, TINY, dtype=dtype, device="cuda"))


@DTYPES
def test_a_chunk_sees_a_long_cached_prefix(dtype):
    check(make_case([100], [9000], QWEN3_0_6B, dtype=dtype, device="cuda"))


def test_dummy_requests_are_harmless():
    case = make_case([1, 1, 1], [0, 300, 0], QWEN3_0_6B, device="cuda")
    alone = make_case([1, 1, 1], [1, 300, 1], QWEN3_0_6B, device="cuda").exact().run()
    output = case.run()
    assert output[[0, 2]].count_nonzero() == 0
    assert_rows_close(output[1], alone[1])


def test_requests_that_share_the_null_block_write_nothing_and_repeat_bit_for_bit():
    case = make_case([1] * 5, [5, 900, 17, 300, 64], QWEN3_0_6B, device="cuda")
    case.metadata.block_tables.zero_()
    case.metadata.slot_mapping.copy_(case.positions % 16)
    before = case.cache.k.clone()
    output = case.run()
    for _ in range(20):
        assert torch.equal(case.run(), output)
    assert torch.equal(case.cache.k, before)


@DTYPES
def test_split_and_unsplit_agree_and_repeat_bit_for_bit(dtype):
    case = make_case([1, 1], [3000, 70], QWEN3_8B, dtype=dtype, device="cuda")
    output = case.run()
    assert_rows_close(output, case.unsplit().run())
    for _ in range(20):
        assert torch.equal(case.run(), output)


def refill(case: AttentionCase, drawn: AttentionCase) -> None:
    """Gives a captured case the contents of a smaller one, at the addresses that it has."""
    num_tokens = len(drawn.q)
    for name in ("q", "k", "v", "positions"):
        getattr(case, name)[:num_tokens] = getattr(drawn, name)
    case.transform.cos[:num_tokens] = drawn.transform.cos
    case.transform.signed_sin[:num_tokens] = drawn.transform.signed_sin
    old, new = case.metadata, drawn.metadata
    old.block_tables.zero_()
    old.block_tables[:, : new.block_tables.shape[1]] = new.block_tables
    old.query_start_loc.copy_(new.query_start_loc)
    old.seq_lens.copy_(new.seq_lens)
    # Padding tokens write to the null block.
    old.slot_mapping.zero_()
    old.slot_mapping[:num_tokens] = new.slot_mapping


@pytest.mark.parametrize(
    ("captured", "replayed"),
    [
        (([1] * 4, [900] * 4), [([1] * 4, [5, 900, 1, 333]), ([1] * 4, [600, 16, 17, 1])]),
        (
            ([253, 1, 1, 1], [900] * 4),
            [([1, 100, 1, 30], [900, 100, 40, 500]), ([7, 1, 240, 1], [7, 1, 700, 900])],
        ),
        (
            ([5] * 4, [2005] * 4),
            [([5] * 4, [2005, 5, 1033, 16]), ([5, 1, 2, 0], [700, 1, 2005, 0])],
        ),
    ],
    ids=["decode", "mixed", "drafts"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_fp8_cache", [False, True], ids=["plain", "fp8-cache"])
def test_a_captured_graph_is_right_on_replay_with_new_contents(
    captured, replayed, has_fp8_cache, dtype
):
    case = make_case(*captured, QWEN3_0_6B, dtype=dtype, device="cuda", has_fp8_cache=has_fp8_cache)
    output = torch.empty_like(case.q, memory_format=torch.contiguous_format)
    case.run_into(output)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run_into(output)
    for seed, (query_lens, seq_lens) in enumerate(replayed):
        drawn = make_case(
            query_lens, seq_lens, QWEN3_0_6B, dtype=dtype, device="cuda", seed=seed + 1
        )
        refill(case, drawn)
        num_tokens = sum(query_lens)
        exact = case.exact()
        output.fill_(torch.nan)
        graph.replay()
        expected = exact.run()
        if has_fp8_cache:
            expected = case.exact_reading().run()
        assert_rows_close(output[:num_tokens], expected)
        tolerance = FP8_ROW_TOLERANCE if has_fp8_cache else ROW_TOLERANCE[dtype]
        assert_rows_close(exact_cache(case.cache).k[1:], exact.cache.k[1:], tolerance)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_attention_never_waits_for_the_device():
    case = make_case(*MIXED, QWEN3_0_6B, device="cuda")
    output = case.run()
    try:
        torch.cuda.set_sync_debug_mode("error")
        case.run_into(output)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_operator_passes_torchs_own_checks_on_the_gpu():
    case = make_case([5, 1], [5, 9], TINY, device="cuda")
    output = torch.zeros(case.q.shape, device="cuda")
    with forward_context(case.context()):
        torch.library.opcheck(
            torch.ops.octavo.unified_attention_with_output.default, case.arguments(output)
        )


SIZES = [(1, 12), (7, 192), (127, 1024), (129, 4096), (3, 12288), (8192, 1024)]


@DTYPES
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_rms_norms_are_the_references(shape, dtype):
    x, residual = (torch.randn(*shape, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device="cuda").to(dtype)
    exact = rms_norm(x.cpu().double(), weight.cpu().double(), 1e-6)
    assert_rows_close(rms_norm(x, weight, 1e-6), exact)
    total = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert_rows_close(normed, rms_norm(total.cpu().double(), weight.cpu().double(), 1e-6))


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 2, 65, 2048])
def test_norms_and_rotations_read_slices_and_write_whole_tensors(num_tokens, dtype):
    def draw(*shape):
        return torch.randn(*shape, device="cuda").to(dtype)

    heads, latent = draw(num_tokens, 48, 128), draw(num_tokens, 1536 + 576)
    first_sin, first_cos = draw(num_tokens, 1, 128).chunk(2, dim=-1)
    rotation = first_cos.repeat(1, 1, 2), torch.cat((-first_sin, first_sin), -1)
    slices = heads[:, :32], heads[:, 32:40], latent[:, :1536], latent[:, 1536:2048]
    for part in (*slices, heads[..., 5:69]):
        weight = draw(part.shape[-1])
        torch.cuda.synchronize()
        normed = rms_norm(part, weight, 1e-6)
        assert normed.is_contiguous()
        assert_rows_close(normed, rms_norm(part.cpu().double(), weight.cpu().double(), 1e-6))
    for part in (
        heads[:, :32],
        heads[:, 32:40],
        draw(num_tokens, 128, 192)[..., 64:],
        heads[:, :1],
    ):
        turned = rotary(part, *rotation)
        assert turned.is_contiguous()
        exact = rotary(part.cpu().double(), *(x.cpu().double() for x in rotation))
        assert_rows_close(turned, exact)


@DTYPES
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_silu_and_mul_is_the_references(shape, dtype):
    x = torch.randn(*shape, device="cuda").to(dtype)
    assert_rows_close(silu_and_mul(x), silu_and_mul(x.cpu().double()))


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize(("has_silu", "gates_first"), [(1, 0), (0, 0), (1, 1)])
def test_gated_norms_are_the_references(num_tokens, has_silu, gates_first, dtype):
    options = (1e-6, bool(has_silu), bool(gates_first))
    for num_groups, size, has_weights in ((32, 128, False), (3, 100, True), (1, 4096, False)):
        x = torch.randn(num_tokens, num_groups * size, device="cuda").to(dtype)
        gate = torch.randn(num_tokens, 2 * x.shape[1], device="cuda").to(dtype)[:, x.shape[1] :]
        shape = (num_groups, size) if has_weights else (size,)
        weight = torch.randn(*shape, device="cuda").to(dtype)
        exact = gated_rms_norm(*(each.cpu().double() for each in (x, gate, weight)), *options)
        assert_rows_close(gated_rms_norm(x, gate, weight, *options), exact)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 36), (7, 4096), (300, 6144)], ids=str)
def test_sigmoid_gates_are_the_references(shape, dtype):
    x, gate = torch.randn(2, *shape, device="cuda").to(dtype)
    for each in (gate, gate[:, :1]):
        expected = sigmoid_gate(x.cpu().double(), each.cpu().double())
        assert_rows_close(sigmoid_gate(x, each), expected)


@DTYPES
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 36), (7, 2880), (300, 4096)])
def test_local_embedding_is_the_references(num_tokens, hidden, dtype):
    weight = torch.randn(100, hidden, device="cuda").to(dtype)
    for kind in (torch.int32, torch.int64):
        # The ids begin where no vector of 16 bytes does.
        token_ids = torch.randint(-10, 300, (num_tokens + 1,), dtype=kind, device="cuda")[1:]
        embedded = local_embedding(token_ids, weight, 50)
        assert torch.equal(embedded.cpu(), local_embedding(token_ids.cpu(), weight.cpu(), 50))


def test_sizes_that_were_not_seen_before_compile_nothing(monkeypatch):
    for query_lens in ([1], [1] * 3, [1] * 200, [3, 1], [100, 1], [100] * 3):
        make_case(query_lens, [200] * len(query_lens), TINY, device="cuda").run()
    compiled = []

    def note(**facts):
        compiled.append(facts["repr"])

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for num_requests in (2, 3, 8, 16, 17, 64, 65, 200):
        make_case([1] * num_requests, [37] * num_requests, TINY, device="cuda").run()
        query_lens = [1, 2, *range(5, 5 + num_requests)]
        make_case(query_lens, [n + 16 for n in query_lens], TINY, device="cuda").run()
    assert compiled == []


def tiny_outputs(device):
    """Runs prompts through chunks, mixed steps and decodes of the trained model, in fp32."""
    driver = StepDriver(
        TINY_CHECKPOINT,
        device=device,
        num_blocks=96,
        block_size=16,
        max_num_batched_tokens=256,
        max_model_len=256,
    )
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 1000, (n,), generator=generator).tolist() for n in (1, 17, 127)]
    first, second, third = (driver.add(prompt) for prompt in prompts)
    driver.step([(first, 1), (third, 100)])
    driver.step([(first, 1), (third, 27), (second, 17)])
    driver.decode([third, first, second], 60)
    return [sequence.output for sequence in (first, second, third)]


def test_greedy_tokens_of_the_tiny_checkpoint_are_those_of_the_cpu():
    assert tiny_outputs("cuda") == tiny_outputs("cpu")


@DTYPES
@pytest.mark.parametrize("shape", [(1, 36), (7, 2048), (300, 5120)], ids=str)
def test_sums_with_gates_are_those_of_plain_operations(shape, dtype):
    total, values, x = torch.randn(3, *shape, device="cuda").to(dtype)
    weight = torch.randn(1, shape[1], device="cuda").to(dtype) / shape[1] ** 0.5
    doubles = [each.cpu().double() for each in (total, values, x, weight)]
    add_gated(total, values, x, weight)
    factor = (doubles[2] @ doubles[3].T).sigmoid()
    assert_rows_close(total, doubles[0] + factor * doubles[1])
