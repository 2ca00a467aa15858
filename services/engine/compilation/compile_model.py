"""Compiles a loaded model at one of the four levels."""

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from models.compile_support import dynamic_arg_dims_of
from services.engine.compilation.cache.artifact_cache import ArtifactCache
from services.engine.compilation.cache.cache_key import Factors
from services.engine.compilation.pieces.compiler_interface import CompilerInterface, EagerAdaptor
from services.engine.compilation.pieces.compiler_manager import CompilerManager, CompileStats
from services.engine.compilation.pieces.inductor_adaptor import InductorStandaloneAdaptor
from services.engine.compilation.pieces.linking import Forward, link
from services.engine.compilation.pieces.piece_compiler import PieceCompiler
from services.engine.compilation.program.debug_dump import DebugDump
from services.engine.compilation.program.piece_info import PieceWrapper
from services.engine.compilation.program.traced_model import TracedModel
from services.engine.compilation.trace.backend import mark_num_tokens
from services.engine.compilation.trace.tracing import trace_programs
from services.engine.config.compilation import CompilationConfig
from services.engine.config.compilation_level import CompilationLevel

log = structlog.get_logger()


class TracedForward:
    """A model's forward under plain torch.compile, traced in one graph and not compiled.

    Dynamo evaluates its guards at every call, as a check of its view of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._signature = inspect.signature(model.forward)
        self._dims = dynamic_arg_dims_of(model)
        self._forward = torch.compile(model.forward, backend="eager", fullgraph=True)

    def __call__(self, *inputs: Tensor) -> Any:
        """Runs the model on a step's inputs."""
        mark_num_tokens(self._signature, self._dims, inputs)
        return self._forward(*inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledModel:
    """The function to call instead of a model's forward, and the compile time.

    is_piecewise: it consists of pieces, each of which was wrapped.
    """

    forward: Forward
    is_piecewise: bool = False
    stats: CompileStats = field(default_factory=CompileStats)


def compile_model(
    model: nn.Module,
    config: CompilationConfig,
    *,
    example_inputs: Sequence[Tensor],
    max_num_tokens: int,
    max_num_seqs: int,
    factors: Factors | None = None,
    piece_wrapper: PieceWrapper | None = None,
    rank: int = 0,
) -> CompiledModel:
    """Compiles a model at the configured level; the model is unchanged and may run meanwhile.

    Levels 2 and 3 trace and compile everything here, without running the model.

    Args:
        model: loaded; its class must declare @support_torch_compile.
        config: level and options.
        example_inputs: arguments of forward with the kinds of a step's, any content.
        max_num_tokens: most tokens in one step.
        max_num_seqs: most requests in one step.
        factors: what compiled pieces depend on; None keeps nothing on disk.
        piece_wrapper: wraps each piece at level 3.
        rank: names the folder of this worker's debug dump.

    Raises:
        ValueError: the model declares nothing, does not return one tensor, or lacks a splitting
            operator.
        ImpureForwardError: its forward changes buffers, attributes or globals.
    """
    if config.level == CompilationLevel.NO_COMPILATION:
        return CompiledModel(forward=model.forward)
    if config.level == CompilationLevel.DYNAMO_AS_IS:
        return CompiledModel(forward=TracedForward(model))
    traced = trace_programs(
        model,
        config,
        example_inputs=example_inputs,
        max_num_tokens=max_num_tokens,
        dump=debug_dump(config, rank),
    )
    return compile_traced(
        traced,
        config,
        max_num_seqs=max_num_seqs,
        factors=factors,
        piece_wrapper=piece_wrapper,
        rank=rank,
    )


def compile_traced(
    traced: TracedModel,
    config: CompilationConfig,
    *,
    max_num_seqs: int,
    factors: Factors | None = None,
    piece_wrapper: PieceWrapper | None = None,
    rank: int = 0,
) -> CompiledModel:
    """Compiles a traced model at level 2 or 3; arguments as for `compile_model`."""
    started_s = time.monotonic()
    dump = debug_dump(config, rank)
    max_num_tokens = traced.programs[-1][0].end
    manager = _make_manager(config, factors)
    is_piecewise = config.level == CompilationLevel.PIECEWISE
    sizes = config.specialised_sizes(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_tokens
    )
    compiler = PieceCompiler(
        manager,
        compile_sizes=sizes if is_piecewise else (),
        piece_wrapper=piece_wrapper if is_piecewise else None,
        dump=dump,
    )
    forward = link(traced, compiler, dump)
    stats = manager.stats
    manager.take_matches(traced.pass_matches)
    log.info(
        "model_compiled",
        level=config.level.name,
        num_pieces=sum(program.num_pieces for _, program in traced.programs),
        num_distinct=stats.num_pieces,
        num_without_code=stats.num_without_code,
        num_loaded=stats.num_loaded,
        compile_s=round(stats.compile_s, 3),
        load_s=round(stats.load_s, 3),
        passes=dict(stats.pass_matches),
        total_s=round(time.monotonic() - started_s, 3),
    )
    return CompiledModel(forward=forward, is_piecewise=is_piecewise, stats=stats)


def _make_manager(config: CompilationConfig, factors: Factors | None) -> CompilerManager:
    compiler: CompilerInterface = (
        InductorStandaloneAdaptor() if config.use_inductor else EagerAdaptor()
    )
    return CompilerManager(
        compiler,
        config.inductor_compile_config,
        cache=None if factors is None else ArtifactCache.open(config.code_dir, factors),
        factors=factors,
    )


def debug_dump(config: CompilationConfig, rank: int) -> DebugDump | None:
    """Returns the folder of a worker's graphs and generated code, if any is wanted."""
    folder = config.debug_dump_path
    return None if folder is None else DebugDump(folder / f"rank_{rank}")
