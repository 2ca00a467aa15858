"""Tokens of a step reach the sinks of their requests."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.engine.core.sink_shares import SinkShares
from services.engine.request import OutputSink
from tests.support.requests import RecordingSink, make_request


class ColumnSink(OutputSink):
    """Keeps the columns that it gets."""

    def __init__(self):
        self.columns = []

    def put(self, output):
        raise AssertionError("a column was expected")

    def put_tokens(self, requests, handles, token_ids):
        self.columns.append((list(requests), unpack(handles, "<u4"), unpack(token_ids, "<i4")))

    def flush(self):
        pass


def unpack(data, kind):
    return np.frombuffer(data, kind).tolist()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**31 - 1)), min_size=1, max_size=12))
def test_each_sink_gets_its_requests_in_order(entries):
    sinks = [ColumnSink() for _ in range(4)]
    requests = [make_request(1) for _ in entries]
    for index, (request, (number, _)) in enumerate(zip(requests, entries, strict=True)):
        request.sink, request.handle = sinks[number], 2**32 - 1 - index
    shares = SinkShares(requests)
    for step in range(2):
        token_ids = np.array([token_id ^ step for _, token_id in entries], np.int32)
        used = shares.put(token_ids)
        assert set(used) == {request.sink for request in requests}
        for sink in used:
            own = [index for index, request in enumerate(requests) if request.sink is sink]
            assert sink.columns[step] == (
                [requests[index] for index in own],
                [requests[index].handle for index in own],
                token_ids[own].tolist(),
            )


def test_a_sink_without_columns_gets_an_output_for_each_request():
    sink = RecordingSink()
    requests = [make_request(1) for _ in range(2)]
    for request in requests:
        request.sink = sink
    SinkShares(requests).put(np.array([5, 6], np.int32))
    assert [(output.request, output.token_ids) for output in sink.outputs] == [
        (requests[0], [5]),
        (requests[1], [6]),
    ]
