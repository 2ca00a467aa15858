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
        """Returns this recording with its output's memory released to later recordings."""
        return CUDARecording(self.graph, tree_map_only(Tensor, _Aliases(), self.output))


class _Part(Protocol):
    def replay(self) -> None:
        """Runs it again."""


@dataclass(frozen=True, slots=True)
class _EagerCall:
    """An operator's call; the graphs own the memory of its tensors."""

    call: Callable[..., Any]
    args: tuple[Any, ...]

    def replay(self) -> None:
        """Calls the operator again."""
        self.call(*self.args)


@dataclass(frozen=True, slots=True)
class CUDAPartsRecording:
    """Captured CUDA graphs and the operators between them."""

    parts: tuple[_Part, ...]
    output: Any

    def replay(self) -> None:
        """Launches the graphs and calls the operators, in order."""
        for part in self.parts:
            part.replay()

    def shared(self) -> "CUDAPartsRecording":
        """Returns this recording with its output's memory released to later recordings."""
        return CUDAPartsRecording(self.parts, tree_map_only(Tensor, _Aliases(), self.output))


class CUDAGraphRecorder:
    """Captures programs on a stream of its own; all graphs share one memory pool.

    Graphs share their temporary memory, so they must be replayed one at a time and in stream order,
    as a worker's steps are.
    """

    checks_every_replay = False

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Makes a stream and a pool.

        Args:
            device: runs the programs.
            dtype: of their matrix products.
        """
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_holder: torch.cuda.CUDAGraph | None = None
        self._load_libraries(dtype)

    def warm_up(self, program: Program) -> Any:
        """Runs a program on the current stream, because lazy loading cannot be captured.

        Raises:
            GraphFaultError: it waits for the device.
        """
        with _as_fault(), _refusing_waits():
            return program()

    def record(self, program: Program) -> CUDARecording:
        """Captures a program without computing it.

        Raises:
            GraphFaultError: CUDA refuses one of its operations.
        """
        with self._on_own_stream(), self._capturing() as graphs:
            graphs.begin()
            output = program()
            return CUDARecording(graphs.end(), output)

    def record_around(self, program: Program, operators: Collection[str]) -> CUDAPartsRecording:
        """Captures a program between the calls of some operators, without computing it.

        Raises:
            GraphFaultError: CUDA refuses an operation, or the program calls none of the operators.
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
        """Returns the used bytes, including the driver's memory for graphs."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def _load_libraries(self, dtype: torch.dtype) -> None:
        """Makes matrix libraries allocate their workspaces for the stream, outside the pool."""
        with torch.cuda.stream(self._stream):
            x = torch.zeros(16, 16, dtype=dtype, device=self._device)
            torch.addmm(x[0], x, x)
            torch.mm(x, x)
        self._stream.synchronize()

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Runs the block between earlier and later work of the current stream.

        CUDA errors in the block become GraphFaultErrors.
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
        """Lets the block capture graphs one after the other; a failure costs the pool."""
        captures = _Captures(self._pool)
        with _without_collections():
            self._hold_pool()
            try:
                yield captures
            except BaseException:
                captures.abandon()
                # Later graphs use a new pool.
                self._pool, self._pool_holder = torch.cuda.graph_pool_handle(), None
                raise

    def _hold_pool(self) -> None:
        """Captures an empty graph, so that the pool is always in use.

        torch cannot capture into a pool whose last graph was dropped while its outputs live (torch
        2.11, CUDACachingAllocator.cpp, beginAllocateToPool).
        """
        if self._pool_holder is None:
            graph = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the graph is empty, says torch
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                graph.capture_end()
            self._pool_holder = graph


class _Captures:
    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device: only this thread's calls are checked.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end(self) -> torch.cuda.CUDAGraph:
        """Returns what was captured since `begin`."""
        graph, self._graph = self._graph, None
        assert graph is not None, "a capture ends after it began"
        graph.capture_end()
        return graph

    def abandon(self) -> None:
        """Takes the stream out of capture mode, if necessary."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):  # CUDA reports the failed capture once more
                graph.capture_end()


class _Memory:
    """Memory of a storage that torch may reuse."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


class _Aliases:
    """Makes tensors over the same elements that do not own their memory.

    Views of one storage share one alias of it.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns a tensor's alias, or a parameter itself, whose memory is never reused."""
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
    """Turns CUDA errors into GraphFaultErrors, except shortages of memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise GraphFaultError(f"the program cannot be captured: {error}") from error


@contextmanager
def _refusing_waits() -> Iterator[None]:
    """Makes waits for the device fail here.

    A failure during a capture would leave torch's random generator in capture mode.
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
    """Prevents garbage collection: destroying other graphs or events would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
