"""Which graphs a worker captures: what was asked for, less what its model and device cannot."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from models.cudagraph_mode import CUDAGraphMode
from models.forward_context import GraphKey

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSupport:
    """What can be captured.

    full_decode: attention of a decode step's query tokens can be part of a graph.
    pieces: the model can be captured around its attention.
    """

    full_decode: bool
    pieces: bool


def supported_mode(wanted: CUDAGraphMode, support: GraphSupport) -> CUDAGraphMode:
    """Returns the mode that comes closest to the one asked for; warns if it is another one.

    Steps with prefill chunks are never captured whole: their attention depends on the chunks'
    lengths, so FULL means pieces for them where there are any.
    """
    pieces = CUDAGraphMode.PIECEWISE if support.pieces else CUDAGraphMode.NONE
    full = CUDAGraphMode.FULL if support.full_decode else pieces
    substitute = {
        CUDAGraphMode.NONE: CUDAGraphMode.NONE,
        CUDAGraphMode.PIECEWISE: pieces,
        CUDAGraphMode.FULL: full,
    }
    decode = substitute[wanted.decode_mode()]
    mixed = wanted.mixed_mode()
    mixed = pieces if mixed is CUDAGraphMode.FULL else substitute[mixed]
    mode = decode if decode is mixed else CUDAGraphMode((decode.value, mixed.value))
    if mode is not wanted:
        log.warning(
            "graph_mode_downgraded",
            wanted=str(wanted),
            mode=str(mode),
            full_decode_supported=support.full_decode,
            pieces_supported=support.pieces,
        )
    return mode


def full_decode_key(batch_size: int, q_len: int = 1) -> GraphKey:
    """Returns the key of the graph of a whole decode step, `q_len` query tokens per request."""
    return GraphKey(
        num_tokens=batch_size * q_len, graph_bs=batch_size, max_q_len=q_len, uniform=True
    )


def piecewise_key(num_tokens: int) -> GraphKey:
    """Returns the key of the graphs of all pieces between attention layers."""
    return GraphKey(num_tokens=num_tokens, graph_bs=num_tokens, max_q_len=num_tokens, uniform=False)


def planned_keys(
    mode: CUDAGraphMode,
    *,
    decode_sizes: tuple[int, ...],
    token_sizes: tuple[int, ...],
    decode_q_len: int = 1,
) -> list[GraphKey]:
    """Returns the graphs to capture: whole decode steps first, and of each kind large ones first.

    Args:
        mode: a supported one.
        decode_sizes: batch sizes of whole decode steps.
        token_sizes: numbers of query tokens of steps that run in pieces.
        decode_q_len: query tokens of each request in a decode step.
    """
    keys = []
    if mode.decode_mode() is CUDAGraphMode.FULL:
        keys += [full_decode_key(size, decode_q_len) for size in sorted(decode_sizes, reverse=True)]
    if mode.requires_piecewise_compilation():
        keys += [piecewise_key(size) for size in sorted(token_sizes, reverse=True)]
    return keys


def with_draft_keys(keys: Sequence[GraphKey]) -> list[GraphKey]:
    """Returns planned graphs and, behind those of decode steps, those of their drafting."""
    whole = [key for key in keys if key.uniform]
    return [*whole, *(replace(key, is_draft=True) for key in whole), *keys[len(whole) :]]
