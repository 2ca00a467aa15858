"""The output of a call whose caller reads slowly, or whose requests fail."""

import asyncio
from types import SimpleNamespace

import pytest

from protos.engine.v1.engine_pb2 import GenerateRequest
from services.engine.edge.call import GenerateCall
from services.engine.errors import DeadlineExpiredError
from services.engine.request import RequestOutput
from services.engine.rpc.single import SingleMessage
from tests.support.requests import make_request


async def test_tokens_that_come_during_a_write_are_written_before_an_error_that_does():
    written = []

    async def write(_, response):
        written.append(list(response.token_ids))
        if len(written) == 1:
            call.put(RequestOutput(request, [8]))
            call.put(RequestOutput(request, [], error=DeadlineExpiredError("too late")))
            call.flush()

    async def send_initial_metadata(_):
        call.put(RequestOutput(request, [7]))
        call.flush()

    def ignore(*_):
        return None

    core = SimpleNamespace(check_ready=ignore, submit=ignore, abort=ignore)
    reader = SimpleNamespace(from_generate=lambda *_, **__: request)
    model = SimpleNamespace(max_model_len=100)
    context = SimpleNamespace(
        time_remaining=ignore,
        invocation_metadata=tuple,
        send_initial_metadata=send_initial_metadata,
    )
    request = make_request([1, 2, 3])
    call = GenerateCall(
        SimpleNamespace(core=core, reader=reader, model=model, write=write), context
    )
    with pytest.raises(DeadlineExpiredError):
        async with asyncio.timeout(60):
            await call.run(SingleMessage(GenerateRequest()))
    assert written == [[7], [8]]
