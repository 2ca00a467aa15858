"""The kernels of latent attention in Triton's interpreter, on the CPU."""

import pytest

from tests.support.programs import run_interpreted

PROGRAM = """
import torch
torch.set_num_threads(1)
from models.kernels.attention.latent import latent_forms, latent_steps
from models.forward_context import IndexChoice
from models.kernels.attention.latent.latent_steps import attend
from tests.support.latent_case import make_latent_case
from tests.support.tolerances import assert_rows_close

SIZES = {"num_heads": 5, "latent_dim": 24, "rope_dim": 8}
BATCHES = (
    (([1] * 4, [5, 1, 0, 170]), False),
    (([1, 7, 20, 1], [5, 7, 90, 33]), False),
    (([1], [300]), False),
    (([3] * 2, [5, 170]), True),
)
for batch, verifies in BATCHES:
    for dtype, top_k, has_transform in (
        (torch.float32, None, True), (torch.float16, None, False), (torch.float16, None, True),
        (torch.float32, 19, True), (torch.float16, 19, False),
    ):
        case = make_latent_case(
            *batch, **SIZES, dtype=dtype, top_k=top_k, has_transform=has_transform,
            has_sinks=top_k is not None and dtype == torch.float32,
        )
        exact = case.exact()
        expected = exact.run()
        output = case.empty_output()
        attend(
            case.queries, case.entries, case.transform, case.cache, case.metadata, output,
            case.scale, case.index, IndexChoice() if case.index else None, case.sinks,
            is_prefill=not verifies,
        )
        for name, tensor in exact.cache.tensors().items():
            assert_rows_close(case.cache.tensors()[name][1:], tensor[1:])
        live = case.metadata.seq_lens.repeat_interleave(case.metadata.query_start_loc.diff()) > 0
        assert_rows_close(output[live], expected[live])
        assert output[~live].count_nonzero() == 0

# Parts of long sequences beside short ones, and beside a chunk. Where no sequence can be longer
# than top_k, queries with sinks attend to all keys.
for batch, options in (
    (([1] * 6, [700, 5, 1, 0, 600, 300]), {}),
    (([1, 3, 0, 1, 1], [600, 9, 0, 40, 300]), {}),
    (([1] * 6, [700, 5, 1, 0, 600, 300]), {"top_k": 10000, "has_sinks": True}),
):
    case = make_latent_case(*batch, **SIZES | {"num_heads": 16}, **options)
    expected = case.exact().run()
    output = case.empty_output()
    attend(
        case.queries, case.entries, case.transform, case.cache, case.metadata, output,
        case.scale, case.index, IndexChoice() if case.index else None, case.sinks,
        is_prefill=True,
    )
    assert case.metadata.workspace.counters.count_nonzero() == 0
    live = case.metadata.seq_lens.repeat_interleave(case.metadata.query_start_loc.diff()) > 0
    assert_rows_close(output[live], expected[live])

# Chunks of 12 query tokens or more are expanded, from pieces of three blocks; a whole tile of keys
# needs no mask.
SIZES |= {"plain_dim": 8, "value_dim": 8}
expanded = []
original = latent_steps.expanded_attention
def watched(*arguments):
    expanded.append(arguments[3].request)
    original(*arguments)
latent_steps.expanded_attention = watched
BATCHES = (
    (([1, 40, 11, 1, 12], [60, 170, 90, 0, 12]), [1, 4]),
    (([13, 14], [13, 120]), [0, 1]),
    (([3, 1, 11], [5, 60, 11]), []),
)
for batch, long in BATCHES:
    for dtype, num_blocks in ((torch.float32, 3), (torch.float16, 100)):
        latent_forms.MOST_EXPANDED_BYTES = num_blocks * 16 * 5 * 16 * dtype.itemsize
        case = make_latent_case(*batch, **SIZES, dtype=dtype)
        exact = case.exact().run()
        # Slots that no request has written may hold anything.
        for tensor in case.cache.tensors().values():
            tensor[0] = torch.nan
            for request, length in enumerate(batch[1]):
                if length % 16:
                    last = case.metadata.block_tables[request, length // 16]
                    tensor[last, length % 16 :] = torch.nan
        output = case.empty_output()
        expanded.clear()
        attend(
            case.queries, case.entries, None, case.cache, case.metadata, output, case.scale, None,
            None, is_prefill=True,
        )
        assert expanded == long
        live = case.metadata.seq_lens.repeat_interleave(case.metadata.query_start_loc.diff()) > 0
        assert_rows_close(output[live], exact[live])
        assert output[~live].count_nonzero() == 0
"""

FP8_CACHE_PROGRAM = """
import torch
torch.set_num_threads(1)
from models.kernels.attention.latent import latent_forms
from models.forward_context import IndexChoice
from models.kernels.attention.latent.latent_steps import attend
from tests.support.interpreter_rounding import round_exactly
from tests.support.latent_case import make_latent_case
from tests.support.tolerances import assert_rows_close
round_exactly()

SIZES = {"num_heads": 5, "latent_dim": 48, "rope_dim": 8, "plain_dim": 8, "value_dim": 8}
BATCHES = (
    (([1] * 3, [5, 0, 70]), False),
    (([3] * 2, [5, 70]), True),
    (([1, 20, 2], [5, 70, 3]), False),
)
# Three pieces of context where keys are expanded.
latent_forms.MOST_EXPANDED_BYTES = 3 * 16 * 5 * 16 * 4
for batch, verifies in BATCHES:
    for dtype, top_k, has_transform in (
        (torch.float32, None, True), (torch.float16, None, False),
        (torch.float32, 19, False),
    ):
        case = make_latent_case(
            *batch, **SIZES, dtype=dtype, top_k=top_k, has_transform=has_transform,
            has_fp8_cache=True, has_sinks=top_k is not None,
        )
        exact = case.exact()
        exact.run()
        output = case.empty_output()
        attend(
            case.queries, case.entries, case.transform, case.cache, case.metadata, output,
            case.scale, case.index, IndexChoice() if case.index else None, case.sinks,
            is_prefill=not verifies,
        )
        live = case.metadata.seq_lens.repeat_interleave(case.metadata.query_start_loc.diff()) > 0
        assert_rows_close(output[live], case.exact_reading().run()[live])
        assert output[~live].count_nonzero() == 0
        for name, tensor in exact.cache.tensors().items():
            written = case.cache.tensors()[name][1:].float()
            if has_transform:
                torch.testing.assert_close(written, tensor[1:].float(), rtol=0.125, atol=0.01)
            else:
                assert torch.equal(written, tensor[1:].float())
"""

INVARIANT_PROGRAM = """
from dataclasses import replace
import torch
torch.set_num_threads(1)
from models.kernels.attention.invariant import invariant_latents
from models.kernels.products.head_linear import head_linear
from tests.support.interpreter_rounding import round_exactly
from tests.support.latent_case import make_latent_case
from tests.support.tolerances import assert_rows_close
round_exactly()

torch.manual_seed(0)
for num_tokens, num_inputs, num_outputs in ((1, 8, 24), (70, 100, 72)):
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(num_tokens, 3, num_inputs + 8).to(dtype)[..., 8:]
        weight = torch.randn(3, num_outputs + 1, num_inputs).to(dtype)[:, 1:].transpose(1, 2)
        output = torch.empty(num_tokens, 3, num_outputs + 2, dtype=dtype)[..., 2:]
        head_linear(x, weight, output)
        assert_rows_close(output, (x.double().unsqueeze(2) @ weight.double()).squeeze(2))
        for row in range(0, num_tokens, 9):
            alone = torch.empty(1, 3, num_outputs, dtype=dtype)
            head_linear(x[row : row + 1].clone(), weight, alone)
            assert torch.equal(alone[0], output[row])

# Several parts of few keys.
invariant_latents.PART = 32
SIZES = {"num_heads": 5, "latent_dim": 48, "rope_dim": 8}
def run(case):
    output = case.empty_output()
    invariant_latents.attend(
        case.queries, case.entries, case.cache, case.metadata, output, case.scale
    )
    return output

for batch in (([1] * 4, [5, 1, 0, 170]), ([1, 7, 20, 1], [5, 7, 90, 33]), ([3] * 2, [5, 170])):
    for dtype, has_fp8_cache in (
        (torch.float32, False), (torch.float16, False), (torch.float32, True)
    ):
        case = make_latent_case(*batch, **SIZES, dtype=dtype, has_fp8_cache=has_fp8_cache)
        output = run(case)
        live = case.metadata.seq_lens.repeat_interleave(case.metadata.query_start_loc.diff()) > 0
        assert_rows_close(output[live], case.exact_reading().run()[live])
        assert output[~live].count_nonzero() == 0
        # One program for all parts of the keys, or one for each part.
        unsplit = replace(case, metadata=replace(case.metadata, workspace=None))
        assert torch.equal(output, run(unsplit))

# A slot of -1 is none: nothing is stored.
case = make_latent_case([2], [2], **SIZES)
case.metadata.slot_mapping[:] = torch.tensor([17, -1])
before = {name: tensor.clone() for name, tensor in case.cache.tensors().items()}
run(case)
for name, tensor in case.cache.tensors().items():
    changed = (tensor != before[name]).flatten(2).any(-1).flatten()
    assert changed.nonzero().flatten().tolist() == [17], name
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [PROGRAM, FP8_CACHE_PROGRAM, INVARIANT_PROGRAM],
    ids=["plain", "fp8-cache", "invariant"],
)
def test_kernels_agree_with_the_references_in_the_interpreter(program):
    run_interpreted(program)
