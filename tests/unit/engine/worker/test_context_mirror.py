"""The forward context has the values of the descriptor, in every step of a mixed load."""

import dataclasses

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.forward_context import (
    PROCESS_LOCAL_FIELDS,
    WORKER_MADE_ATTENTION_FIELDS,
    WORKER_MADE_CONTEXT_FIELDS,
    AttentionMetadata,
    Context,
    ForwardContext,
    SpecDecodeMetadata,
    get_forward_context,
)
from services.engine.batch import read_int32, runtime_mode
from services.engine.compilation.graphs.capture_plan import read_key
from services.engine.compilation.graphs.dispatch_mode import DispatchMode
from services.engine.spec_decode.verification import NO_DRAFT
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.graph_engine import GraphEngine

NEVER_SET = {"dp_metadata"}
"""Set with several data-parallel ranks: see runner/test_data_parallel_steps.py."""
ATTENTION = torch.ops.octavo.latent_attention_with_output.default
NUM_DRAFTS = 2


def names(of, *without):
    return {field.name for field in dataclasses.fields(of)} - set().union(*without)


class SeenContexts(DispatchMode):
    """Collects the forward contexts that attention runs in."""

    def __init__(self):
        super().__init__()
        self.contexts = []
        self._last = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ATTENTION:
            context = get_forward_context()
            if context is not self._last:
                self._last = context
                self.contexts.append(kept(context))
        return func(*args, **(kwargs or {}))


def kept(value):
    """Copies the tensors of a context, which later steps overwrite."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, ForwardContext | Context | AttentionMetadata | SpecDecodeMetadata):
        changes = {name: kept(getattr(value, name)) for name in names(type(value))}
        return dataclasses.replace(value, **changes)
    return value


class WatchedRunner:
    """Keeps each step's descriptor and forward contexts, where Python runs: not in whole graphs."""

    def __init__(self, runner):
        self._runner = runner
        self.steps = []

    def execute(self, descriptor):
        if runtime_mode(descriptor.cudagraph_runtime_mode) is CUDAGraphMode.FULL:
            return self._runner.execute(descriptor)
        with SeenContexts() as seen:
            pending = self._runner.execute(descriptor)
        self.steps.append((descriptor, seen.contexts))
        return pending


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    write_draft_checkpoint(folder, agreement=0.98)
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
        cudagraph_capture_sizes=(1,),
        cudagraph_piece_sizes=(16,),
    )
    engine = GraphEngine(folder, config, num_speculative_tokens=NUM_DRAFTS)
    engine.capture()
    engine.runner = watched = WatchedRunner(engine.runner)
    engine.run([[5, 17, 3, 8], [44, 2, 9], [7] * 30], 8)
    complete = {order.step_id: order for order, _ in engine.steps}
    seen = [
        (complete[order.step_id], contexts)
        for order, contexts in watched.steps
        if order.step_id in complete
    ]
    # A carried request's length is known to the device; the bound for all stays as it was sent.
    for order, _ in seen:
        order.attn_metadata.max_seqlen_k = engine.sent[order.step_id].attn_metadata.max_seqlen_k
    assert any(each.spec_decode_metadata.carried_requests for each in engine.sent.values())
    return seen


def test_the_steps_run_with_and_without_graphs_and_some_verify_drafts(steps):
    modes = {context.cudagraph_runtime_mode for _, contexts in steps for context in contexts}
    assert modes == {CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE}
    assert any(order.spec_decode_metadata.draft_token_ids for order, _ in steps)
    assert any(order.context.is_prefill for order, _ in steps)
    assert not all(order.context.is_prefill for order, _ in steps)


def test_the_shape_of_the_batch_is_the_ordered_one(steps):
    fields = names(Context, WORKER_MADE_CONTEXT_FIELDS)
    for order, (context, *_) in steps:
        found = {name: getattr(context.context, name) for name in fields}
        assert found == {name: getattr(order.context, name) for name in fields}


def test_attention_gets_what_was_ordered(steps):
    fields = names(AttentionMetadata, WORKER_MADE_ATTENTION_FIELDS)
    for order, (context, *_) in steps:
        for name in fields:
            found, ordered = (
                getattr(each, name) for each in (context.attn_metadata, order.attn_metadata)
            )
            if isinstance(found, torch.Tensor):
                found, ordered = found.tolist(), read_int32(ordered).tolist()
            assert found == ordered, name


def test_the_graph_and_its_mode_are_the_ordered_ones(steps):
    for order, (context, *_) in steps:
        assert context.cudagraph_runtime_mode is runtime_mode(order.cudagraph_runtime_mode)
        if not order.HasField("graph_key"):
            assert context.batch_descriptor is None
            continue
        assert context.batch_descriptor == read_key(order.graph_key)
        assert context.batch_descriptor.kind is GraphKind.PIECEWISE


def test_draft_passes_and_no_others_are_marked_and_have_the_ordered_drafts(steps):
    for order, (context, *drafting) in steps:
        assert context.spec_decode_metadata is None
        for metadata in (each.spec_decode_metadata for each in drafting):
            ids = metadata.draft_token_ids
            ordered = order.spec_decode_metadata
            assert ids[ids != NO_DRAFT].tolist() == read_int32(ordered.draft_token_ids).tolist()
            assert metadata.num_spec_steps == ordered.num_spec_steps
            assert metadata.num_next_drafts == ordered.num_next_drafts
    assert any(drafting for _, (_, *drafting) in steps)


def test_every_field_is_set_in_some_step(steps):
    contexts = [context for _, contexts in steps for context in contexts]
    fields = names(ForwardContext, PROCESS_LOCAL_FIELDS)
    is_set = {name for name in fields if any(getattr(each, name) is not None for each in contexts)}
    assert fields - is_set == NEVER_SET
