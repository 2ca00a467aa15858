"""Compiles each distinct piece once, across processes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule

from services.engine.compilation.cache.artifact_cache import ArtifactCache
from services.engine.compilation.cache.cache_key import Factors, digest
from services.engine.compilation.pieces.compiler_interface import (
    CompilerInterface,
    EagerAdaptor,
    LoadError,
    Runnable,
)
from services.engine.compilation.program.compile_range import TYPICAL_NUM_TOKENS
from services.engine.compilation.program.graph_signature import graph_signature
from services.engine.compilation.program.own_kernels import only_calls_own_kernels

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class CompileStats:
    """Counts and times of compilation so far.

    num_pieces: distinct pieces and sizes requested. num_loaded: of these, loaded from disk.
    num_without_code: of these, made of our operators alone. compile_s, load_s: seconds.
    compile_s, load_s: seconds. pass_matches: matches of each compiler pass, by name.
    """

    num_pieces: int = 0
    num_loaded: int = 0
    num_without_code: int = 0
    compile_s: float = 0.0
    load_s: float = 0.0
    pass_matches: Mapping[str, int] = field(default_factory=dict)


class CompilerManager:
    """Compiles pieces, or finds compiled ones in memory or on disk."""

    def __init__(
        self,
        compiler: CompilerInterface,
        settings: Mapping[str, Any],
        *,
        cache: ArtifactCache | None = None,
        factors: Factors | None = None,
    ) -> None:
        """Starts without pieces in memory.

        Args:
            compiler: compiles the pieces.
            settings: the compiler's, by name.
            cache: keeps pieces on disk.
            factors: what the cache's pieces depend on; required with it.
        """
        self._compiler = compiler
        self._compiler_hash = compiler.compute_hash()
        self._settings = settings
        self._cache = cache
        self._factors = factors
        self._pieces: dict[str, Runnable] = {}
        self.stats = CompileStats()

    def compile(
        self,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        runtime_shape: int | None = None,
        *,
        typical: int = TYPICAL_NUM_TOKENS,
    ) -> Runnable:
        """Returns a graph compiled for any number of tokens, or for one.

        Graphs that compute the same share one compiled piece. A graph of our operators alone, for
        which a compiler has nothing to generate, runs as traced.

        Args:
            graph: the piece.
            example_inputs: fake tensors and symbolic integers, or those of one number of tokens.
            runtime_shape: this number.
            typical: without it, the number of tokens to tune for.
        """
        signature = graph_signature(graph)
        has_code = not only_calls_own_kernels(graph)
        # Code that is not generated is not tuned either.
        tuned_for = typical if has_code else TYPICAL_NUM_TOKENS
        key = self._key(signature, runtime_shape, tuned_for)
        piece = self._pieces.get(key)
        if piece is not None:
            return piece
        self.stats.num_pieces += 1
        if has_code:
            if runtime_shape is None:
                _tune_for(typical, example_inputs)
            piece = self._load(key) or self._compile(key, graph, example_inputs, runtime_shape)
        else:
            self.stats.num_without_code += 1
            piece, _ = EagerAdaptor().compile(graph, example_inputs, self._settings)
        self._pieces[key] = piece
        return piece

    @property
    def compiles(self) -> bool:
        """Whether compiled code differs from traced code."""
        return self._compiler.name != EagerAdaptor.name

    def find(self, signature: str, typical: int = TYPICAL_NUM_TOKENS) -> Runnable | None:
        """Returns the piece of a graph with this signature for any number of tokens, if on disk.

        typical: as for `compile`.
        """
        key = self._key(signature, None, typical)
        piece = self._pieces.get(key)
        if piece is None:
            piece = self._load(key)
            if piece is None:
                return None
            self.stats.num_pieces += 1
            self._pieces[key] = piece
        return piece

    def take_matches(self, matches: Mapping[str, int]) -> None:
        """Keeps the matches of each compiler pass, by name, with the pieces on disk."""
        self.stats.pass_matches = matches
        if self._cache is not None and self._cache.num_artifacts:
            self._cache.store_matches(matches)

    def _key(self, signature: str, runtime_shape: int | None, typical: int) -> str:
        compiler = (self._compiler.name, self._compiler_hash)
        size = f"about {typical}" if runtime_shape is None else str(runtime_shape)
        return digest("\n".join((*compiler, size, signature)))

    def _load(self, key: str) -> Runnable | None:
        """Returns a piece from disk; None if it is absent or unusable."""
        handle = None if self._cache is None else self._cache.load(key)
        if handle is None:
            return None
        started_s = time.monotonic()
        try:
            piece = self._compiler.load(handle)
        except LoadError as error:
            log.warning("compiled_piece_not_loaded", key=key, error=str(error))
            return None
        self.stats.num_loaded += 1
        self.stats.load_s += time.monotonic() - started_s
        return piece

    def _compile(
        self,
        key: str,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        runtime_shape: int | None,
    ) -> Runnable:
        started_s = time.monotonic()
        with torch.no_grad():
            piece, handle = self._compiler.compile(
                graph, example_inputs, self._settings, runtime_shape
            )
        self.stats.compile_s += time.monotonic() - started_s
        if self._cache is not None and handle is not None:
            assert self._factors is not None, "a cache comes with its factors"
            self._cache.describe(self._factors)
            self._cache.store(key, handle)
        return piece


def _tune_for(num_tokens: int, example_inputs: Sequence[Any]) -> None:
    """Gives the symbols in a piece's inputs a value to tune for; it bounds nothing."""
    for value in example_inputs:
        for size in value.shape if isinstance(value, Tensor) else (value,):
            if isinstance(size, SymInt):
                for symbol in size.node.expr.free_symbols:
                    size.node.shape_env.var_to_hint_override[symbol] = num_tokens
