"""Compiles a loaded model at one of the four levels."""

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import SymInt, Tensor, nn

from models.compile_support import DynamicArgDims, dynamic_arg_dims_of
from models.deepseek_mtp import DraftLayer
from models.layers.attention import Attention
from models.layers.latent_attention import LatentAttention
from services.engine.compilation.artifact_cache import ArtifactCache
from services.engine.compilation.backend import OctavoBackend
from services.engine.compilation.cache_key import Factors
from services.engine.compilation.compiler_interface import CompilerInterface, EagerAdaptor
from services.engine.compilation.compiler_manager import CompilerManager, CompileStats
from services.engine.compilation.inductor_adaptor import InductorStandaloneAdaptor
from services.engine.compilation.piece_info import PieceWrapper
from services.engine.compilation.purity import check_inputs_are_unchanged, no_side_effects
from services.engine.compilation.split_graph import num_calls
from services.engine.compilation.transformed_code import dumping_transformed_code
from services.engine.config.compilation import DEFAULT_SPLITTING_OPS, CompilationConfig
from services.engine.config.compilation_level import CompilationLevel

log = structlog.get_logger()

TYPICAL_NUM_TOKENS = 256
"""Number of tokens that general kernels are tuned for."""


class CompiledForward:
    """A model's forward without Dynamo: no guards, no tracing."""

    def __init__(self, backend: OctavoBackend, inputs: Sequence[Tensor]) -> None:
        """Binds the compiled pieces to the weights of the traced model.

        Args:
            backend: the backend of the trace.
            inputs: the traced tensors themselves.
        """
        traced = backend.traced_call
        assert backend.whole is not None, "the backend was called"
        assert traced is not None, "the backend was called"
        assert backend.graph is not None, "the backend was called"
        if traced.num_outputs != 1:
            raise ValueError(f"forward returns {traced.num_outputs} tensors; it must return one")
        self._run = backend.whole
        placeholders = backend.graph.graph.find_nodes(op="placeholder")
        kinds = [node.meta["example_value"] for node in placeholders]
        self._args = list(traced.args)
        self._inputs: list[tuple[int, int]] = []
        self._sizes: list[tuple[int, int, int]] = []
        for slot, value in enumerate(traced.args):
            for number, given in enumerate(inputs):
                if value is given:
                    self._inputs.append((slot, number))
        for slot, kind in enumerate(kinds):
            if isinstance(kind, SymInt):
                self._sizes.append((slot, *self._dimension_of(kind, kinds)))
        for slot, _ in self._inputs:
            self._args[slot] = None  # frees the traced example

    def __call__(self, *inputs: Tensor) -> Any:
        """Runs the model on a step's inputs."""
        args = self._args.copy()
        for slot, number in self._inputs:
            args[slot] = inputs[number]
        for slot, number, dim in self._sizes:
            args[slot] = inputs[number].shape[dim]
        return self._run(*args)[0]

    def _dimension_of(self, size: SymInt, kinds: Sequence[Any]) -> tuple[int, int]:
        """Returns the input and the dimension of a symbolic size."""
        for slot, number in self._inputs:
            for dim, other in enumerate(kinds[slot].shape):
                if isinstance(other, SymInt) and other.node.expr == size.node.expr:
                    return number, dim
        raise AssertionError(f"no input has the size {size}")


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
        _mark_num_tokens(self._signature, self._dims, inputs)
        return self._forward(*inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledModel:
    """The function to call instead of a model's forward, and the compile time."""

    forward: Callable[..., Any]
    stats: CompileStats


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
        return CompiledModel(forward=model.forward, stats=CompileStats())
    if config.level == CompilationLevel.DYNAMO_AS_IS:
        return CompiledModel(forward=TracedForward(model), stats=CompileStats())
    is_piecewise = config.level == CompilationLevel.PIECEWISE
    started_s = time.monotonic()
    manager = _make_manager(config, factors)
    sizes = config.specialised_sizes(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_tokens
    )
    backend = OctavoBackend(
        manager,
        splitting_ops=config.splitting_ops if is_piecewise else (),
        compile_sizes=sizes if is_piecewise else (),
        piece_wrapper=piece_wrapper if is_piecewise else None,
        debug_dump_path=_dump_folder(config, rank),
    )
    with dumping_transformed_code(_dump_folder(config, rank)):
        _trace(model, backend, example_inputs)
    if is_piecewise:
        _check_splits(model, backend, config.splitting_ops)
    stats = manager.stats
    log.info(
        "model_compiled",
        level=config.level.name,
        num_pieces=sum(not item.is_splitting_graph for item in backend.items),
        num_distinct=stats.num_pieces,
        num_loaded=stats.num_loaded,
        compile_s=round(stats.compile_s, 3),
        load_s=round(stats.load_s, 3),
        total_s=round(time.monotonic() - started_s, 3),
    )
    return CompiledModel(forward=CompiledForward(backend, example_inputs), stats=stats)


def _make_manager(config: CompilationConfig, factors: Factors | None) -> CompilerManager:
    compiler: CompilerInterface = (
        InductorStandaloneAdaptor() if config.use_inductor else EagerAdaptor()
    )
    return CompilerManager(
        compiler,
        config.inductor_compile_config,
        cache=None if factors is None else ArtifactCache.open(config.compile_cache_dir, factors),
        factors=factors,
    )


def _trace(model: nn.Module, backend: OctavoBackend, inputs: Sequence[Tensor]) -> None:
    """Compiles a model by one trace of Dynamo."""
    signature = inspect.signature(model.forward)
    _mark_num_tokens(signature, dynamic_arg_dims_of(model), inputs)
    try:
        with torch.no_grad(), no_side_effects():
            torch.compile(model.forward, backend=backend, fullgraph=True)(*inputs)
    finally:
        # Dynamo's own dispatch is never used again.
        torch._dynamo.reset()
    assert backend.graph is not None, "tracing calls the backend"
    check_inputs_are_unchanged(backend.graph)


def _mark_num_tokens(
    signature: inspect.Signature, dynamic_dims: DynamicArgDims, inputs: Sequence[Tensor]
) -> None:
    """Makes the number of tokens a symbol without any bound, not even above 1."""
    arguments = signature.bind(*inputs).arguments
    for name, dims in dynamic_dims.items():
        tensor = arguments.get(name)
        if not isinstance(tensor, Tensor):
            continue
        for dim in dims:
            torch._dynamo.decorators.mark_unbacked(
                tensor, dim % tensor.dim(), shape_id="num_tokens", hint_override=TYPICAL_NUM_TOKENS
            )


def _check_splits(model: nn.Module, backend: OctavoBackend, splitting_ops: Sequence[str]) -> None:
    """Raises ValueError unless the graph is split at every splitting operator and attention."""
    assert backend.graph is not None, "the model was traced"
    for name in splitting_ops:
        # A model uses one kind of attention.
        if name not in DEFAULT_SPLITTING_OPS and not num_calls(backend.graph, (name,)):
            raise ValueError(f"splitting operator {name} does not occur in the model")
    if set(DEFAULT_SPLITTING_OPS) <= set(splitting_ops):
        num_splits = num_calls(backend.graph, DEFAULT_SPLITTING_OPS)
        # Draft layers run after the model.
        drafting = {
            module
            for layer in model.modules()
            if isinstance(layer, DraftLayer)
            for module in layer.modules()
        }
        kinds = (Attention, LatentAttention)
        num_layers = sum(
            isinstance(module, kinds) for module in model.modules() if module not in drafting
        )
        assert num_splits == num_layers, f"{num_splits} splits for {num_layers} attention layers"


def _dump_folder(config: CompilationConfig, rank: int) -> Path | None:
    return None if config.debug_dump_path is None else config.debug_dump_path / f"rank_{rank}"
