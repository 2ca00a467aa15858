"""Latent attention against float64 references: every dtype, odd shapes, replay in a graph."""

from dataclasses import replace

import pytest
import torch

from models.kernels.attention.latent.latent_forms import least_expanded_queries
from models.ops.attention.index_rounding import quantize_index
from tests.support.invariance import batch_invariance
from tests.support.latent_case import make_latent_case
from tests.support.tolerances import FP8_ROW_TOLERANCE, ROW_TOLERANCE, assert_rows_close

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", ROW_TOLERANCE, ids=str)
HEAD = {"plain_dim": 128, "value_dim": 128}
SIZES = {
    "deepseek-v3": {"num_heads": 128, "latent_dim": 512, "rope_dim": 64, **HEAD},
    "deepseek-v2-lite": {"num_heads": 16, "latent_dim": 512, "rope_dim": 64, **HEAD},
    "odd": {"num_heads": 5, "latent_dim": 24, "rope_dim": 8},
}
BATCHES = {
    "decode": ([1] * 6, [1, 7, 16, 129, 1000, 2049]),
    "one": ([1], [3000]),
    "mixed": ([1, 7, 33, 1, 40], [1, 7, 300, 128, 1000]),
    "chunk": ([300], [700]),
    "long": ([1] * 8, [9000, 300, 40, 1, 5000, 16, 2, 700]),
    "long-beside-a-chunk": ([1, 1, 30, 1, 0, 1], [9000, 4000, 1000, 1, 0, 300]),
    "long-beside-many-queries": ([1, 260, 1, 0, 1], [5000, 300, 2, 0, 300]),
    "long-among-many": ([1] * 270, [3000] + [9] * 268 + [2000]),
}
FORMS = {
    "first": ([200], [200]),
    "mixed": ([1, 300, 40, 1, 1, 513], [900, 1200, 60, 7, 33, 1537]),
}


@DTYPES
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_output_is_the_references(batch, sizes, dtype):
    case = make_latent_case(*batch, **sizes, dtype=dtype, device="cuda")
    exact = case.exact()
    expected = exact.run()
    assert_rows_close(case.run(), expected)
    for name, tensor in exact.cache.tensors().items():
        assert torch.equal(case.cache.tensors()[name][1:].double().cpu(), tensor[1:])


@DTYPES
@pytest.mark.parametrize("top_k", [None, 16])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_norm_rotation_and_write_have_the_bits_of_separate_operators(sizes, top_k, dtype):
    case = make_latent_case(
        *BATCHES["mixed"], **sizes, dtype=dtype, device="cuda", top_k=top_k, has_transform=True
    )
    separate = case.transformed()
    assert torch.equal(case.run(), separate.run())
    for name, tensor in separate.cache.tensors().items():
        assert torch.equal(case.cache.tensors()[name][1:], tensor[1:])


@DTYPES
@pytest.mark.parametrize("batch", (BATCHES | FORMS).values(), ids=(BATCHES | FORMS).keys())
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_cache_of_8_bits_is_read_and_written_as_the_reference_does(sizes, batch, dtype):
    sizes = sizes | ({"latent_dim": 48} if sizes["latent_dim"] == 24 else {})
    case = make_latent_case(*batch, **sizes, dtype=dtype, device="cuda", has_fp8_cache=True)
    exact = case.exact()
    exact.run()
    output = case.run()
    for name, tensor in exact.cache.tensors().items():
        assert torch.equal(case.cache.tensors()[name][1:].float().cpu(), tensor[1:].float())
    assert_rows_close(output, case.exact_reading().run())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_latent_vectors_of_8_bits_are_rounded_after_their_norm(dtype):
    sizes = SIZES["deepseek-v3"]
    case = make_latent_case(
        *BATCHES["mixed"], **sizes, dtype=dtype, device="cuda", has_transform=True,
        has_fp8_cache=True,
    )  # fmt: skip
    separate = case.transformed()
    pairs = [(case.run(), separate.run())]
    for name, tensor in separate.cache.tensors().items():
        pairs.append((case.cache.tensors()[name][1:].float(), tensor[1:].float()))
    for actual, expected in pairs:
        if dtype is torch.bfloat16:
            assert torch.equal(actual, expected)
        else:
            # A sum's order depends on the kernel's layout, which bfloat16 rounds away.
            assert_rows_close(actual, expected, FP8_ROW_TOLERANCE)


@pytest.mark.parametrize("top_k", [16, 100])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_tokens_chosen_in_8_bits_are_the_references(batch, top_k):
    sizes = SIZES["odd"] | {"latent_dim": 48}
    case = make_latent_case(*batch, **sizes, device="cuda", top_k=top_k, has_fp8_cache=True)
    output = case.run()
    assert_rows_close(output, case.exact_reading().run())


@DTYPES
def test_an_index_is_rounded_as_the_reference_does(dtype):
    from models.kernels.attention.latent.latent_cache import cache_latents  # needs Triton

    case = make_latent_case(
        *BATCHES["mixed"], **SIZES["deepseek-v3"], dtype=dtype, device="cuda", top_k=16,
        has_fp8_cache=True,
    )  # fmt: skip
    index, entries = case.index, case.entries
    index = replace(index, q=torch.randn_like(index.q) * 3)
    keys = torch.randn_like(entries.index_keys) * 0.01
    case = replace(case, index=index, entries=replace(entries, index_keys=keys))
    _, rounded = cache_latents(
        case.queries, index, case.entries, None, case.cache, case.metadata.slot_mapping
    )
    queries, scales = quantize_index(index.q.cpu())
    assert torch.equal(rounded.q.cpu().float(), queries.float())
    assert torch.equal(rounded.weights.cpu(), index.weights.cpu() * scales)
    exact = case.exact()
    exact.run()
    for name, tensor in exact.cache.tensors().items():
        assert torch.equal(case.cache.tensors()[name][1:].float().cpu(), tensor[1:].float())


# Where scores are rounded more, another token may be chosen.
@pytest.mark.parametrize(
    ("dtype", "top_k"), [*((dtype, None) for dtype in ROW_TOLERANCE), (torch.float32, 16)], ids=str
)
def test_queries_that_verify_drafts_split_their_keys(dtype, top_k):
    lengths = [3, 7, 129, 1000, 2049]
    case = make_latent_case(
        [3] * 5, lengths, **SIZES["odd"], dtype=dtype, device="cuda", top_k=top_k, is_prefill=False
    )
    exact = case.exact().run()
    assert_rows_close(case.run(), exact)


@pytest.mark.parametrize("top_k", [16, 100])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_a_token_that_chooses_has_the_bits_that_it_has_alone_in_batch_invariant_mode(batch, top_k):
    case = make_latent_case(
        *batch, **SIZES["deepseek-v3"], dtype=torch.bfloat16, top_k=top_k, has_transform=False,
        device="cuda",
    )  # fmt: skip
    live = case.metadata.seq_lens.repeat_interleave(case.metadata.query_start_loc.diff()) > 0
    with batch_invariance():
        whole = case.run()
        for token in live.nonzero().flatten().tolist()[::7]:
            assert torch.equal(case.alone(token).run()[0], whole[token])


@pytest.mark.parametrize("top_k", [16, 100])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_chosen_tokens_are_the_references(batch, top_k):
    # In float32: where scores are rounded more, another token may be chosen.
    case = make_latent_case(*batch, **SIZES["odd"], device="cuda", top_k=top_k)
    exact = case.exact()
    expected = exact.run()
    assert_rows_close(case.run(), expected)
    assert torch.equal(case.cache.index_keys[1:].double().cpu(), exact.cache.index_keys[1:])


@pytest.mark.parametrize("has_fp8_cache", [False, True])
@pytest.mark.parametrize("top_k", [16, 2**15])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_sinks_join_the_softmax_of_the_reference(batch, top_k, has_fp8_cache):
    sizes = SIZES["odd"] | {"latent_dim": 48}
    case = make_latent_case(
        *batch, **sizes, device="cuda", top_k=top_k, has_fp8_cache=has_fp8_cache, has_sinks=True
    )
    exact = case.exact()
    output = case.run()
    assert_rows_close(output, case.exact_reading().run() if has_fp8_cache else exact.run())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_sinks_of_hy4s_heads_are_the_references(batch, dtype):
    sizes = SIZES["deepseek-v3"] | {"num_heads": 32, "plain_dim": 192, "value_dim": 256}
    # All tokens are chosen: where scores are rounded, another one may be.
    case = make_latent_case(
        *batch, **sizes, dtype=dtype, device="cuda", top_k=2**15, has_sinks=True
    )
    assert_rows_close(case.run(), case.exact().run())


@DTYPES
@pytest.mark.parametrize("batch", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_forms_agree_with_the_reference_in_pieces_of_context(batch, sizes, dtype, monkeypatch):
    num_heads, head = sizes["num_heads"], sizes.get("plain_dim", 16) * 2
    most = 512 * num_heads * head * dtype.itemsize
    monkeypatch.setattr("models.kernels.attention.latent.latent_forms.MOST_EXPANDED_BYTES", most)
    case = make_latent_case(*batch, **sizes, dtype=dtype, device="cuda")
    # The other tests' steps are in one form; these have requests of both.
    least = least_expanded_queries(case.queries.sizes)
    longest = [chunk.num_queries >= least for chunk in case.metadata.chunks]
    assert any(longest)
    expected = case.exact().run()
    assert_rows_close(case.run(), expected)


def test_long_steps_are_scored_in_runs(monkeypatch):
    monkeypatch.setattr("models.kernels.attention.latent.index_choice.MOST_SCORES", 1000)
    case = make_latent_case(*BATCHES["mixed"], **SIZES["odd"], device="cuda", top_k=16)
    exact = case.exact().run()
    assert_rows_close(case.run(), exact)


@pytest.mark.parametrize("top_k", [None, 3])
def test_dummy_requests_get_zeros(top_k):
    sizes = SIZES["odd"]
    case = make_latent_case(
        [1, 1], [9, 0], **sizes, dtype=torch.bfloat16, device="cuda", top_k=top_k
    )
    assert case.run()[1].count_nonzero() == 0


@pytest.mark.parametrize("has_fp8_cache", [False, True])
@pytest.mark.parametrize("top_k", [None, 30])
@pytest.mark.parametrize("batch", [BATCHES["decode"], BATCHES["mixed"]], ids=["decode", "mixed"])
def test_a_captured_call_follows_its_inputs(batch, top_k, has_fp8_cache):
    sizes = SIZES["deepseek-v2-lite"]
    case = make_latent_case(
        *batch, **sizes, dtype=torch.bfloat16, device="cuda", top_k=top_k, has_transform=True,
        has_fp8_cache=has_fp8_cache,
    )  # fmt: skip
    output = case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run_into(output)
    for _ in range(2):
        case.queries.plain.copy_(torch.randn_like(case.queries.plain))
        graph.replay()
        assert torch.equal(output, case.run())


@pytest.mark.parametrize("has_fp8_cache", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_in_batch_invariant_mode_a_row_has_the_same_bits_in_every_step(sizes, dtype, has_fp8_cache):
    sizes = sizes | ({"latent_dim": 48} if sizes["latent_dim"] == 24 else {})
    sizes["num_heads"] = min(24, sizes["num_heads"])
    whole = make_latent_case(
        [1300], [1300], **sizes, dtype=dtype, device="cuda", has_fp8_cache=has_fp8_cache,
        has_transform=True,
    )  # fmt: skip
    with batch_invariance():
        expected = whole.run()
    assert_rows_close(expected, whole.exact_reading().run())
    with batch_invariance():
        for spans in (
            [(0, 1)],
            [(1299, 1300)],
            [(511, 513)],
            [(0, 700), (700, 1300)],
            [(n, n + 1) for n in (0, 5, 511, 512, 1023, 1024, 1299)],
            [(n, n + 1) for n in range(0, 1300, 4)],
            [(n, n + n % 7 + 1) for n in range(0, 1290, 9)],
        ):
            rows = torch.cat([expected[start:end] for start, end in spans])
            assert torch.equal(_step_of(whole, spans).run(), rows), spans[:8]


def _step_of(whole, spans):
    """Returns a step whose requests compute these tokens of a sequence, each after its prefix."""
    lengths = [end - start for start, end in spans]
    tokens = torch.cat([torch.arange(*span, device="cuda") for span in spans])

    def own(operands, names):
        return replace(operands, **{name: getattr(operands, name)[tokens] for name in names})

    metadata = replace(
        whole.metadata,
        query_start_loc=torch.tensor([0, *lengths], device="cuda").cumsum(0).int(),
        seq_lens=torch.tensor([end for _, end in spans], dtype=torch.int32, device="cuda"),
        row_ids=torch.zeros(len(spans), dtype=torch.int32, device="cuda"),
        block_tables=whole.metadata.block_tables.repeat(len(spans), 1),
        slot_mapping=whole.metadata.slot_mapping[tokens],
        max_seqlen_q=max(lengths),
        chunks=(),
    )
    return replace(
        whole,
        queries=own(whole.queries, ("plain", "rotated")),
        entries=own(whole.entries, ("latent", "rotated")),
        transform=own(whole.transform, ("cos", "signed_sin")),
        metadata=metadata,
        positions=whole.positions[tokens],
    )
