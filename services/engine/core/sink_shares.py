"""Splits a column of tokens among the sinks of its requests."""

from array import array
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from services.engine.batch import Int32Array
from services.engine.request import OutputSink, Request


class _Share(NamedTuple):
    """Requests of one sink, at these bytes of a column that is in the order of the sinks."""

    sink: OutputSink
    at: slice
    requests: Sequence[Request]
    handles: bytes


class SinkShares:
    """The requests of a column by sink; steps with the same requests use it again."""

    def __init__(self, requests: Sequence[Request]) -> None:
        """Groups requests by their sinks."""
        self.requests = requests
        """Requests in the order that they were given in."""
        indices: dict[OutputSink, list[int]] = {}
        for index, request in enumerate(requests):
            indices.setdefault(request.sink, []).append(index)
        self._order: Int32Array | None = None
        """Indices of the requests in the order of the sinks, of which there are several."""
        if len(indices) > 1:
            self._order = np.concatenate([np.array(each, np.int32) for each in indices.values()])
        self._shares: list[_Share] = []
        start = 0
        for sink, of_sink in indices.items():
            own = [requests[index] for index in of_sink]
            handles = array("I", [request.handle for request in own]).tobytes()
            at = slice(start, start := start + len(handles))
            self._shares.append(_Share(sink, at, own, handles))
        self._sinks = indices.keys()

    def put(self, token_ids: Int32Array) -> Set[OutputSink]:
        """Puts a token of each request into its sink; returns the sinks.

        token_ids: [n], in the order of the requests.
        """
        in_order = token_ids if self._order is None else token_ids[self._order]
        data = in_order.tobytes()
        for sink, at, requests, handles in self._shares:
            sink.put_tokens(requests, handles, data[at])
        return self._sinks
