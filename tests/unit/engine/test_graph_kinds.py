"""A graph's kind decides the mode of its steps: in models, on the wire and in the worker."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from services.engine import batch
from services.engine.batch import BatchDescriptor, ordered_mode, runtime_mode
from services.engine.compilation.graphs.capture_plan import (
    encoder_key,
    full_decode_key,
    mixed_keys,
    piecewise_key,
    read_key,
    wire_key,
    with_draft_keys,
)
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.graph_engine import GraphEngine

FULL = batch.CUDAGraphMode.CUDA_GRAPH_MODE_FULL
PIECEWISE = batch.CUDAGraphMode.CUDA_GRAPH_MODE_PIECEWISE


@pytest.mark.parametrize("kind", GraphKind)
def test_the_wire_says_the_same_of_every_kind(kind):
    assert batch.GraphKind.Name(kind) == f"GRAPH_KIND_{kind.name}"
    if kind.is_ordered:
        mode = ordered_mode(batch.GraphKey(kind=batch.GraphKind.Name(kind)))
        assert runtime_mode(mode) is kind.runtime_mode


def test_the_wire_has_no_other_kinds():
    numbers = set(batch.GraphKind.values())
    assert numbers == {batch.GraphKind.GRAPH_KIND_UNSPECIFIED, *GraphKind}


def test_a_step_without_a_graph_runs_in_mode_none():
    assert runtime_mode(ordered_mode(None)) is CUDAGraphMode.NONE


def test_every_planned_key_travels():
    others = [*mixed_keys(64, 8), piecewise_key(64), encoder_key(256)]
    planned = with_draft_keys([full_decode_key(4, 3), *others])
    assert {key.kind for key in planned} == set(GraphKind)
    for key in planned:
        wire = batch.GraphKey.FromString(wire_key(key).SerializeToString())
        assert read_key(wire) == key


def test_a_key_without_a_kind_is_refused():
    with pytest.raises(ValueError, match="0 is not a valid GraphKind"):
        read_key(batch.GraphKey(num_tokens=4, graph_bs=4, max_q_len=1))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_draft_checkpoint(folder, agreement=0.98)
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=(4,),
        cudagraph_piece_sizes=(64,),
    )
    engine = GraphEngine(folder, config, num_speculative_tokens=2)
    engine.capture()
    engine.run([[5, 17, 3, 8], [44, 2, 9]], 4)
    return engine


@pytest.mark.parametrize(
    ("kind", "mode", "other_kind", "other_mode"),
    [
        (GraphKind.DECODE, FULL, GraphKind.DECODE, PIECEWISE),
        (GraphKind.PIECEWISE, PIECEWISE, GraphKind.PIECEWISE, FULL),
        (GraphKind.DECODE, FULL, GraphKind.PIECEWISE, FULL),
        (GraphKind.DECODE, FULL, GraphKind.MIXED, FULL),
        (GraphKind.DECODE, FULL, GraphKind.DRAFT, FULL),
    ],
)
def test_the_worker_refuses_a_mode_that_contradicts_the_kind(
    engine, kind, mode, other_kind, other_mode
):
    orders = (order for order, _ in engine.steps if order.graph_key.kind == kind)
    descriptor = BatchDescriptor()
    descriptor.CopyFrom(next(orders))
    assert descriptor.cudagraph_runtime_mode == mode
    descriptor.graph_key.kind = other_kind
    descriptor.cudagraph_runtime_mode = other_mode
    with pytest.raises(ValueError, match="descriptor is invalid"):
        engine.runner.execute(descriptor)
