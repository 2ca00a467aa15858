"""Every combination of graph mode, level, attention, drafts and sizes has a plan that can run."""

from itertools import product

import pytest

from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.ops.attention.cudagraph_support import AttentionCGSupport
from services.engine.compilation.graphs.capture_plan import (
    graph_support,
    planned_keys,
    supported_mode,
)
from services.engine.config.compilation import DEFAULT_SPLITTING_OPS
from services.engine.config.compilation_level import CompilationLevel
from services.engine.limits import StepLimits
from services.engine.worker.start.graph_setup import piece_graphs, prepare_graphs
from tests.support.compilation import compilation_config
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint

SIZES = (None, (), (1,), (4, 64), (10_000,))
NUM_DRAFTS = (0, 1, 3)
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4}


def configurations(level):
    return [
        compilation_config(
            level=level,
            cudagraph_mode=mode,
            cudagraph_capture_sizes=sizes,
            cudagraph_piece_sizes=piece_sizes,
        )
        for mode, sizes, piece_sizes in product(CUDAGraphMode, SIZES, SIZES)
    ]


def check_plan(keys, mode, limits):
    assert len(set(keys)) == len(keys)
    is_decode_whole = mode.decode_mode() is CUDAGraphMode.FULL
    for key in keys:
        assert 1 <= key.num_tokens <= limits.max_num_batched_tokens
        assert 1 <= key.graph_bs <= key.num_tokens
        if key.kind is GraphKind.DECODE:
            assert is_decode_whole
            assert key.max_q_len == limits.decode_q_len
        else:
            assert mode.mixed_mode() is key.kind.runtime_mode


@pytest.mark.parametrize("level", CompilationLevel, ids=str)
@pytest.mark.parametrize("attention", AttentionCGSupport, ids=str)
def test_on_a_gpu_with_and_without_kernels(attention, level):
    for config, num_drafts in product(configurations(level), NUM_DRAFTS):
        limits = StepLimits(**LIMITS, vocab_size=97, num_speculative_tokens=num_drafts)
        support = graph_support(
            attention,
            level,
            decode_q_len=limits.decode_q_len,
            on_cpu=False,
        )
        choice = supported_mode(config.graph_mode("cpu"), support)
        mode = choice.mode
        assert bool(choice.reason) == (mode is not config.graph_mode("cpu"))
        if not config.graph_mode("cpu"):
            assert not mode
        keys = planned_keys(
            mode,
            decode_sizes=config.capture_sizes(limits.max_decodes),
            token_sizes=config.piece_sizes(limits.max_num_batched_tokens),
            max_num_seqs=limits.max_num_seqs,
            decode_q_lens=(limits.decode_q_len,),
        )
        check_plan(keys, mode, limits)
        if attention is AttentionCGSupport.NEVER:
            assert not any(key.kind is not GraphKind.PIECEWISE for key in keys)


@pytest.fixture(scope="module", params=NUM_DRAFTS)
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    write_draft_checkpoint(folder, agreement=0.98)
    return GraphEngine(folder, compilation_config(), **LIMITS, num_speculative_tokens=request.param)


@pytest.mark.parametrize("level", CompilationLevel, ids=str)
def test_a_worker_on_a_cpu_prepares_its_graphs(engine, level):
    runner, limits = engine.runner, engine.limits
    pieces = piece_graphs(runner.device, runner.model.lm_head.weight.dtype)
    for config in configurations(level):
        prepared = prepare_graphs(
            runner, config, limits=limits, pieces=pieces, on_fault=lambda outcome: None
        )
        planned = prepared.graphs.planned
        drafting = [key for key in planned if key.kind is GraphKind.DRAFT]
        own = [key for key in planned if key.kind is not GraphKind.DRAFT]
        check_plan(own, prepared.mode, limits)
        has_drafts = limits.num_speculative_tokens > 0
        num_decodes = sum(key.kind is GraphKind.DECODE for key in own)
        assert len(drafting) == (num_decodes if has_drafts else 0)


@pytest.mark.parametrize("mode", CUDAGraphMode, ids=str)
def test_pieces_that_would_hold_attention_are_refused(engine, mode):
    config = compilation_config(cudagraph_mode=mode, splitting_ops=("octavo::rms_norm",))
    pieces = piece_graphs(engine.runner.device, engine.runner.model.lm_head.weight.dtype)

    def prepare():
        return prepare_graphs(
            engine.runner,
            config,
            limits=engine.limits,
            pieces=pieces,
            on_fault=lambda outcome: None,
        )

    if mode.requires_piecewise_compilation():
        with pytest.raises(ValueError, match="splitting_ops is octavo::rms_norm; graphs of pieces"):
            prepare()
    else:
        assert prepare().mode is mode


@pytest.mark.parametrize(
    ("variant", "operator"),
    [
        ("deepseek_v4", "octavo::compressed_attention_with_output"),
        ("minimax_m3", "octavo::block_sparse_attention_with_output"),
        ("qwen3_next", "octavo::gated_delta_net"),
    ],
)
def test_pieces_that_would_hold_one_of_a_models_mixers_are_refused(variant, operator, tmp_path):
    write_checkpoint(tmp_path, variant)
    config = compilation_config(
        cudagraph_mode=CUDAGraphMode.PIECEWISE,
        splitting_ops=[each for each in DEFAULT_SPLITTING_OPS if each != operator],
    )
    with pytest.raises(ValueError, match=f"; graphs of pieces need {operator} among them"):
        GraphEngine(tmp_path, config, **LIMITS)
