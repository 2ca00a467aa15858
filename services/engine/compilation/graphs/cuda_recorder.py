"""Records CUDA graphs."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

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
        return CUDARecording(self.graph, tree_map_only(Tensor, _alias, self.output))


class CUDAGraphRecorder:
    """Captures programs on a stream of its own; all graphs share one memory pool.

    Sharing needs graphs to be replayed one at a time and in stream order, as a worker's steps are:
    a graph's temporary memory is that of every other graph.
    """

    checks_every_replay = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, program: Program) -> CUDARecording:
        """Captures a program, which must have run before: what it loads lazily cannot be captured.

        Raises:
            GraphFaultError: it waits for the device, or does something else that CUDA refuses.
        """
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), _without_collections():
            try:
                # Libraries allocate workspaces per stream, which must not be in the pool.
                with _refusing_waits():
                    program()
                self._stream.synchronize()
                # Other threads may go on using the device: only this one's calls are watched.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = program()
                except RuntimeError:
                    self._abandon(graph)
                    raise
                graph.capture_end()
            except RuntimeError as error:
                raise GraphFaultError(f"the program cannot be captured: {error}") from error
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return CUDARecording(graph, output)

    def synchronize(self) -> None:
        """Waits until the device has done all that was asked of it."""
        torch.cuda.synchronize(self._device)

    def num_used_bytes(self) -> int:
        """Returns the bytes that are not free, those that the driver keeps for graphs included."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Takes the stream out of capture mode; later graphs get another pool."""
        with suppress(RuntimeError):  # CUDA reports the failed capture once more
            graph.capture_end()
        self._pool = torch.cuda.graph_pool_handle()


class _Memory:
    """Memory of a tensor that torch may meanwhile give to others."""

    def __init__(self, tensor: Tensor) -> None:
        length = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (length * tensor.element_size(),),
            "typestr": "|u1",
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    """Returns the same elements without keeping their memory from being given to others."""
    if not tensor.numel():
        return tensor
    memory = torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride())


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
