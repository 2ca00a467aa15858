"""A scope surrounds every kind of call, and what it raises ends the call."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from services.transport.call_scope import scoped


class Scopes:
    """Notes when calls enter and leave; raises on entry if asked to."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.refusal: Exception | None = None

    @contextmanager
    def __call__(self, context: object) -> Iterator[None]:
        if self.refusal is not None:
            raise self.refusal
        self.events.append(f"enter {context}")
        try:
            yield
        finally:
            self.events.append("leave")


async def coroutine(request: object, context: object) -> str:
    return f"{request} {context}"


async def generator(request: object, context: object):
    yield request
    yield context


async def test_a_coroutine_runs_inside():
    scopes = Scopes()
    handler = scoped(grpc.stream_stream_rpc_method_handler(coroutine, len, repr), scopes)
    assert await handler.stream_stream("question", "caller") == "question caller"
    assert scopes.events == ["enter caller", "leave"]
    assert (handler.request_deserializer, handler.response_serializer) == (len, repr)


async def test_a_generator_runs_inside_to_its_end():
    scopes = Scopes()
    handler = scoped(grpc.unary_stream_rpc_method_handler(generator), scopes)
    answers = handler.unary_stream("question", "caller")
    assert await anext(answers) == "question"
    assert scopes.events == ["enter caller"]
    assert [answer async for answer in answers] == ["caller"]
    assert scopes.events == ["enter caller", "leave"]


async def test_a_refusal_comes_before_the_method():
    scopes = Scopes()
    scopes.refusal = PermissionError("no")
    handler = scoped(grpc.unary_unary_rpc_method_handler(coroutine), scopes)
    with pytest.raises(PermissionError):
        await handler.unary_unary("question", "caller")
