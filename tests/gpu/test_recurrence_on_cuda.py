"""Kernels of recurrent states on a GPU, against loops in float64."""

from dataclasses import replace

import pytest
import torch

from models.state_cache import StateSpec, read_recurrent
from tests.support.invariance import batch_invariance
from tests.support.recurrence_case import (
    check,
    make_conv_case,
    make_delta_case,
    make_linear_case,
    make_space_case,
    make_step,
    state_spec,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float32]
BATCHES = {
    "single-tokens": [1] * 9,
    "drafts": [5, 3, 0, 5, 1],
    "lengths": [0, 1, 5, 63, 64, 65, 200, 1, 0, 128],
    "long": [1, 1500, 2, 0, 700],
}
STATES = {
    "full": (16, 32, 128, 128, torch.float32),
    "one-head": (1, 1, 128, 128, torch.float32),
    "narrow": (2, 4, 64, 128, torch.float32),
    "odd": (3, 6, 24, 40, torch.float32),
    "small": (2, 4, 8, 16, torch.float32),
    "large": (1, 2, 256, 192, torch.float32),
    "bfloat16": (4, 8, 128, 128, torch.bfloat16),
}
SPACES = {
    "full": (8, 64, 64, 128, torch.float32),
    "one-group": (1, 8, 64, 128, torch.bfloat16),
    "odd": (2, 6, 40, 24, torch.float32),
    "small": (2, 8, 8, 6, torch.float32),
}
CACHES = {"keys": (16 * 2 * 128 * 2, 2), "one-row": (0, 1), "odd": (5 * 516, 2)}
LONG_TOLERANCE = {torch.float32: 1e-4}
"""Error of outputs of heads that hardly decay: 1,500 factors are rounded one after the other."""
STATE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def step_of(lens, spec, cache, **options):
    unit_bytes, regions = cache
    return make_step(
        lens, spec, unit_bytes=max(unit_bytes, spec.row_bytes), regions=regions, device="cuda",
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("width", [2, 3, 4, 7])
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolution(dtype, lens, width, cache):
    for channels in (8192, 100):
        spec = StateSpec(conv_channels=channels, conv_width=width, conv_dtype=dtype)
        step = step_of(lens, spec, cache, num_dummies=3)
        check(make_conv_case(step, dtype=dtype, num_padding=5, has_bias=width == 3))


@pytest.mark.parametrize("decays_channels", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_delta_rule(dtype, lens, state, cache, decays_channels):
    num_k_heads, *sizes = state
    step = step_of(lens, state_spec(*sizes), cache, num_dummies=3)
    case = make_delta_case(
        step, num_k_heads, dtype=dtype, num_padding=5, decays_channels=decays_channels
    )
    check(case, state_tolerance=max(STATE_TOLERANCE[dtype], STATE_TOLERANCE[sizes[-1]]))


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("sizes", SPACES.values(), ids=SPACES)
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_space(dtype, lens, sizes, cache):
    num_groups, *sizes = sizes
    step = step_of(lens, state_spec(*sizes), cache, num_dummies=3)
    case = make_space_case(step, num_groups, dtype=dtype, num_padding=5)
    check(case, state_tolerance=max(STATE_TOLERANCE[dtype], STATE_TOLERANCE[sizes[-1]]))


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("dim", [128, 96, 40, 8])
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decayed_linear_attention(dtype, lens, dim, cache):
    step = step_of(lens, state_spec(16, dim, dim), cache, num_dummies=3)
    case = make_linear_case(step, dtype=dtype, num_padding=5)
    check(case, tolerance=LONG_TOLERANCE.get(dtype), state_tolerance=STATE_TOLERANCE[dtype])


@pytest.mark.parametrize("decays_channels", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("decay_floor", [0.0, -5.0])
def test_gates_of_other_families(decay_floor, lens, decays_channels):
    step = step_of(lens, state_spec(8, 128, 128), CACHES["keys"])
    case = make_delta_case(
        step, 8, dtype=torch.bfloat16, decays_channels=decays_channels, beta_scale=2.0,
        decay_floor=decay_floor,
    )  # fmt: skip
    check(case, state_tolerance=STATE_TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("kind", ["conv", "gdn", "kda", "space", "linear"])
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_state_is_kept_after_every_token(dtype, lens, kind, cache):
    """With four drafts a step reads one of five states, and writes one for each token."""
    options = {"num_dummies": 3, "num_slots": 5}
    tolerance = {"state_tolerance": STATE_TOLERANCE[dtype]}
    if kind == "conv":
        spec = StateSpec(conv_channels=8192, conv_width=4, conv_dtype=dtype)
        check(make_conv_case(step_of(lens, spec, cache, **options), dtype=dtype, num_padding=5))
    elif kind == "space":
        step = step_of(lens, state_spec(64, 64, 128), cache, **options)
        check(make_space_case(step, 8, dtype=dtype, num_padding=5), **tolerance)
    elif kind == "linear":
        step = step_of(lens, state_spec(16, 128, 128), cache, **options)
        case = make_linear_case(step, dtype=dtype, num_padding=5)
        check(case, tolerance=LONG_TOLERANCE.get(dtype), **tolerance)
    else:
        step = step_of(lens, state_spec(32, 128, 128), cache, **options)
        is_kda = kind == "kda"
        case = make_delta_case(step, 16, dtype=dtype, num_padding=5, decays_channels=is_kda)
        check(case, **tolerance)


def delta_case(lens, **options):
    step = step_of(lens, state_spec(8, 128, 128), CACHES["keys"], **options)
    return make_delta_case(step, 4, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_slots", [1, 5])
@pytest.mark.parametrize("lens", BATCHES.values(), ids=BATCHES)
def test_a_graph_replays_with_other_contents(lens, num_slots):
    cases = [delta_case(lens, seed=seed, num_slots=num_slots) for seed in range(3)]
    captured = delta_case(lens, seed=3, num_slots=num_slots)
    output = captured.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run_into(output)
    for case in cases:
        source, target = case.step, captured.step
        target.cache.memory.copy_(source.cache.memory)
        for name in ("block_tables", "seq_lens", "query_start_loc"):
            getattr(target.metadata, name).copy_(getattr(source.metadata, name))
        for name in ("qkv", "a", "b", "a_log", "dt_bias"):
            getattr(captured, name).copy_(getattr(case, name))
        graph.replay()
        assert torch.equal(output, case.run())
        assert torch.equal(target.cache.memory, source.cache.memory)


@pytest.mark.parametrize("dtype", STATE_TOLERANCE, ids=str)
def test_bits_do_not_depend_on_the_batch(dtype):
    spec = state_spec(8, 128, 128, dtype)
    lens = [65, 0, 1, 130, 5]
    with batch_invariance():
        whole = make_delta_case(step_of(lens, spec, CACHES["keys"]), 4, dtype=torch.bfloat16)
        cut = make_delta_case(step_of(lens, spec, CACHES["keys"]), 4, dtype=torch.bfloat16)
        output = whole.run()
        cut_output = torch.full_like(output, torch.nan)
        for part in parts_of(cut, 48):
            part_output = part.run()
            cut_output = torch.where(part_output.isnan(), cut_output, part_output)
        assert torch.equal(output, cut_output)
        assert torch.equal(whole.step.cache.memory, cut.step.cache.memory)


@pytest.mark.parametrize("dtype", STATE_TOLERANCE, ids=str)
def test_a_token_beside_drafts_has_the_bits_of_one_alone(dtype):
    """The last state and all outputs of one state a request, and of five."""
    spec = state_spec(8, 128, 128, dtype)
    lens = [5, 3, 1, 4]
    with batch_invariance():
        alone, beside = (
            make_delta_case(
                step_of(lens, spec, CACHES["keys"], num_slots=num_slots), 4, dtype=torch.bfloat16
            )
            for num_slots in (1, 5)
        )
        output = torch.full_like(alone.qkv[:, : 8 * 128].view(-1, 8, 128), torch.nan)
        for part in parts_of(alone, 1):
            part_output = part.run()
            output = torch.where(part_output.isnan(), output, part_output)
        assert torch.equal(beside.run(), output)
    states = [
        read_recurrent(case.step.cache, case.step.pages_after(case.step.lengths))
        for case in (alone, beside)
    ]
    assert torch.equal(*states)


def parts_of(case, size):
    """Yields steps of one request each, of at most `size` tokens, which stay where they are."""
    metadata = case.step.metadata
    lengths, seq_lens = metadata.query_start_loc.diff().tolist(), metadata.seq_lens.tolist()
    for request, (start, end) in enumerate(case.step.spans):
        for first in range(start, end, size):
            last = min(first + size, end)
            computed = seq_lens[request] - lengths[request] + last - start
            step = replace(
                case.step,
                metadata=replace(
                    metadata,
                    query_start_loc=metadata.query_start_loc.new_tensor([first, last]),
                    seq_lens=metadata.seq_lens.new_tensor([computed]),
                    block_tables=metadata.block_tables[request : request + 1],
                    max_seqlen_q=last - first,
                ),
            )
            yield replace(case, step=step)
