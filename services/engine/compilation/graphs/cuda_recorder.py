"""Records CUDA graphs."""

import gc
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from models.ops.custom_op import interrupted
from services.engine.compilation.graphs.recorder import GraphFaultError, Program


@dataclass(frozen=True, slots=True)
class CUDARecording:
    """A captured CUDA graph, replayed on the current stream."""

    graph: torch.cuda.CUDAGraph
    output: Any

    def replay(self) -> None:
        """Launches the graph."""
        self.graph.replay()

    def shared(self) -> "CUDARecording":
        """Returns this recording, but leaves the memory of its output to those made after it."""
        return CUDARecording(self.graph, tree_map_only(Tensor, _Aliases(), self.output))


class _Part(Protocol):
    """A graph, or a call between two graphs."""

    def replay(self) -> None:
        """Runs it again."""


@dataclass(frozen=True, slots=True)
class _EagerCall:
    """An operator's call; the memory of its tensors is the graphs'."""

    call: Callable[..., Any]
    args: tuple[Any, ...]

    def replay(self) -> None:
        """Calls the operator again."""
        self.call(*self.args)


@dataclass(frozen=True, slots=True)
class CUDAPartsRecording:
    """Captured CUDA graphs and the operators between them, replayed on the current stream."""

    parts: tuple[_Part, ...]
    output: Any

    def replay(self) -> None:
        """Launches the graphs and calls the operators, in order."""
        for part in self.parts:
            part.replay()

    def shared(self) -> "CUDAPartsRecording":
        """Returns this recording, but leaves the memory of its output to those made after it."""
        return CUDAPartsRecording(self.parts, tree_map_only(Tensor, _Aliases(), self.output))


class CUDAGraphRecorder:
    """Captures programs on a stream of its own; all graphs share one memory pool.

    Sharing needs graphs to be replayed one at a time and in stream order, as a worker's steps are:
    a graph's temporary memory is that of every other graph.
    """

    checks_every_replay = False

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Makes a stream and a pool.

        Args:
            device: where programs run.
            dtype: of their matrix products.
        """
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_holder: torch.cuda.CUDAGraph | None = None
        self._load_libraries(dtype)

    def warm_up(self, program: Program) -> Any:
        """Runs a program on the current stream: what it loads lazily cannot be captured.

        Raises:
            GraphFaultError: it waits for the device.
        """
        with _as_fault(), _refusing_waits():
            return program()

    def record(self, program: Program) -> CUDARecording:
        """Captures a program, which computes nothing.

        Raises:
            GraphFaultError: it does something that CUDA refuses.
        """
        with self._on_own_stream(), self._capturing() as graphs:
            graphs.begin()
            output = program()
            return CUDARecording(graphs.end(), output)

    def record_around(self, program: Program, operators: Collection[str]) -> CUDAPartsRecording:
        """Captures what a program does between the calls of some operators; it computes nothing.

        Raises:
            GraphFaultError: it does something that CUDA refuses, or calls none of the operators.
        """
        parts: list[_Part] = []
        aliases = _Aliases()
        with self._on_own_stream(), self._capturing() as graphs:

            def interrupt(call: Callable[..., Any], args: tuple[Any, ...]) -> None:
                parts.append(graphs.end())
                aliased = [aliases(arg) if isinstance(arg, Tensor) else arg for arg in args]
                parts.append(_EagerCall(call, tuple(aliased)))
                graphs.begin()

            graphs.begin()
            with interrupted(operators, interrupt):
                output = program()
            parts.append(graphs.end())
        if len(parts) == 1:
            raise GraphFaultError(f"the program calls none of {', '.join(sorted(operators))}")
        return CUDAPartsRecording(tuple(parts), output)

    def num_used_bytes(self) -> int:
        """Returns the bytes that are not free, including the driver's memory for graphs."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def _load_libraries(self, dtype: torch.dtype) -> None:
        """Has the libraries of matrix products allocate their workspaces for the stream.

        They must not be in the pool.
        """
        with torch.cuda.stream(self._stream):
            x = torch.zeros(16, 16, dtype=dtype, device=self._device)
            torch.addmm(x[0], x, x)
            torch.mm(x, x)
        self._stream.synchronize()

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Runs the block after the current stream's work, whose later work follows the block.

        An error of CUDA in the block becomes a GraphFaultError.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with _as_fault(), torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @contextmanager
    def _capturing(self) -> Iterator["_Captures"]:
        """Lets the block capture one graph after the other; a failed one costs the pool."""
        captures = _Captures(self._pool)
        with _without_collections():
            self._hold_pool()
            try:
                yield captures
            except BaseException:
                captures.abandon()
                # Later graphs get another pool.
                self._pool, self._pool_holder = torch.cuda.graph_pool_handle(), None
                raise

    def _hold_pool(self) -> None:
        """Captures nothing into the pool once, so that a graph uses it at any time.

        Nothing can be captured into a pool whose last graph was dropped while its outputs live
        (torch 2.11, CUDACachingAllocator.cpp, beginAllocateToPool).
        """
        if self._pool_holder is None:
            graph = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the graph is empty, says torch
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                graph.capture_end()
            self._pool_holder = graph


class _Captures:
    """Begins and ends captures on the current stream, into one memory pool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        """Captures what is launched from now on."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device: only this one's calls are watched.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> torch.cuda.CUDAGraph:
        """Returns what was captured since `begin`."""
        graph, self._graph = self._graph, None
        assert graph is not None, "a capture ends after it began"
        graph.capture_end()
        return graph

    def abandon(self) -> None:
        """Takes the stream out of capture mode, if it is in it."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):  # CUDA reports the failed capture once more
                graph.capture_end()


class _Memory:
    """Memory of a storage that torch may meanwhile give to others."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


class _Aliases:
    """Makes tensors of the same elements that do not keep their memory from being given to others.

    Those of one recording share what is made for a storage: attention's inputs are views of few.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the alias of a tensor, or a parameter itself: its memory is never given away."""
        if isinstance(tensor, torch.nn.Parameter) or not tensor.numel():
            return tensor
        storage = tensor.untyped_storage()
        place = (storage.data_ptr(), storage.nbytes(), tensor.dtype)
        memory = self._memory.get(place)
        if memory is None:
            memory = torch.as_tensor(_Memory(*place[:2]), device=tensor.device).view(tensor.dtype)
            self._memory[place] = memory
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@contextmanager
def _as_fault() -> Iterator[None]:
    """Makes a GraphFaultError of what CUDA refuses; running out of memory is another matter."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise GraphFaultError(f"the program cannot be captured: {error}") from error


@contextmanager
def _refusing_waits() -> Iterator[None]:
    """Makes what waits for the device fail here.

    Failing in the middle of a capture would leave torch's random generator in capture mode.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps Python from destroying other graphs and events meanwhile, which would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
