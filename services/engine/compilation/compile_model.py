"""Compiles a loaded model at one of the four levels."""

import inspect
import time
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


def compile_traced(
    traced: TracedModel,
    config: CompilationConfig,
    *,
    max_num_seqs: int,
    factors: Factors | None = None,
    piece_wrapper: PieceWrapper | None = None,
    rank: int = 0,
) -> CompiledModel:
    """Compiles a traced model at level 2 or 3.

    Args:
        traced: the model's programs.
        config: level and options.
        max_num_seqs: most requests in one step.
        factors: what compiled pieces depend on; None keeps nothing on disk.
        piece_wrapper: wraps each piece at level 3.
        rank: names the folder of this worker's debug dump.
    """
    started_s = time.monotonic()
    dump = debug_dump(config, rank)
    max_num_tokens = traced.programs[-1][0].end
    manager = make_manager(config, factors)
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


def make_manager(config: CompilationConfig, factors: Factors | None) -> CompilerManager:
    """Returns the compiler of a configuration's pieces; factors: as in `compile_traced`."""
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
