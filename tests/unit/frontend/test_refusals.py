"""Everything that can be wrong with a request has its status, before any token."""

import grpc
import pytest

from protos.common.v1.failure_pb2 import Failure
from protos.frontend.v1 import frontend_pb2 as pb
from services.frontend.errors import FrontendError
from services.frontend.rpc.status import STATUS_CODES
from services.transport.status import RETRY_PUSHBACK
from tests.support.byte_tokenizer import tokenizer_files
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND


def generate(text: str = "one two", **options: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, options=pb.GenerationOptions(**options))


def chat(*messages: tuple[str, str], **options: object) -> pb.ChatRequest:
    return pb.ChatRequest(
        messages=[pb.ChatMessage(role=role, content=content) for role, content in messages],
        options=pb.GenerationOptions(**options),
    )


def with_unknown_field(message, path: str = ""):
    """The message, with a field that the contract does not have inside `path`."""
    target = message
    for name in filter(None, path.split(".")):
        target = getattr(target, name)
    target.MergeFromString(b"\xfa\x3f\x01x")  # field 1023, length 1
    return message


async def refusal(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


def tokens(*ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=ids))


GENERATE_CASES = {
    "no prompt": (pb.GenerateRequest(), INVALID, "empty"),
    "empty text": (generate(""), INVALID, "empty"),
    "no tokens": (tokens(), INVALID, "empty"),
    "token outside": (tokens(512), INVALID, "512 is not below 512"),
    "long prompt": (
        generate("one " * 600),
        INVALID,
        "tokens > 512, which prompt and output together",
    ),
    "huge prompt": (generate("x" * 2001 * 4), INVALID, "8004 bytes; the limit is 8000"),
    "other model": (generate(model="gpt"), NOT_FOUND, "'gpt' is not served; 'fake' is"),
    "long id": (generate(request_id="x" * 129), INVALID, "129 characters"),
    "many stops": (generate(stop=["x"] * 17), INVALID, "17 strings"),
    "empty stop": (generate(stop=[""]), INVALID, "0 bytes"),
    "long salt": (generate(cache_salt="x" * 129), INVALID, "129 characters"),
    "long stop": (generate(stop=["\u00e9" * 129]), INVALID, "258 bytes"),
    "unknown field": (with_unknown_field(generate()), INVALID, "field 1023"),
    "unknown field inside": (
        with_unknown_field(generate(), "options.sampling"),
        INVALID,
        "SamplingParams has the field 1023",
    ),
}
CHAT_CASES = {
    "no messages": (chat(), INVALID, "0 messages"),
    "many messages": (chat(*[("user", "")] * 4097), INVALID, "4097 entries; the limit is 4096"),
    "unknown role": (chat(("robot", "hi")), INVALID, "no role is called robot"),
    "huge content": (chat(("user", "x" * 8001)), INVALID, "the limit is 8000"),
    "other model": (chat(("user", "x"), model="gpt"), NOT_FOUND, "not served"),
}


@pytest.fixture
async def stack():
    async with (
        FakeEngine() as engine,
        frontend_stack(engine, max_prompt_bytes=8000) as running,
    ):
        yield running


@pytest.mark.parametrize("name", GENERATE_CASES)
async def test_generate_refuses(stack, name):
    request, code, message = GENERATE_CASES[name]
    error = await refusal(stack.stub.Generate(request))
    assert error.code() == code
    assert message in error.details()
    assert not stack.engine.submits


@pytest.mark.parametrize("name", CHAT_CASES)
async def test_chat_refuses(stack, name):
    request, code, message = CHAT_CASES[name]
    error = await refusal(stack.stub.Chat(request))
    assert error.code() == code
    assert message in error.details()


async def test_a_model_without_template_refuses_chat_but_not_generate():
    engine = FakeEngine(files=tokenizer_files(chat_template=None))
    async with engine, frontend_stack(engine) as stack:
        error = await refusal(stack.stub.Chat(chat(("user", "x"))))
        assert error.code() == INVALID
        assert "no chat template" in error.details()
        assert [response async for response in stack.stub.Generate(generate())]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (3, grpc.StatusCode.INVALID_ARGUMENT),
        (4, grpc.StatusCode.DEADLINE_EXCEEDED),
        (5, grpc.StatusCode.NOT_FOUND),
        (6, grpc.StatusCode.ALREADY_EXISTS),
        (14, grpc.StatusCode.UNAVAILABLE),
    ],
)
@pytest.mark.parametrize("when", ["rejection", "failure"])
async def test_what_the_engine_says_passes_through(stack, code, expected, when):
    setattr(stack.engine, when, Failure(code=code, message="says the engine"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [response async for response in stack.stub.Generate(generate())]
    assert caught.value.code() == expected
    assert caught.value.details() == "says the engine"


async def test_a_full_engine_says_when_to_come_back(stack):
    stack.engine.rejection = Failure(code=8, message="queue full", retry_after_ms=250)
    error = await refusal(stack.stub.Generate(generate()))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (RETRY_PUSHBACK, "250") in list(error.trailing_metadata())


async def test_other_failures_of_the_engine_are_shown_as_an_id_only(stack):
    stack.engine.rejection = Failure(code=13, message="secret details")
    error = await refusal(stack.stub.Generate(generate()))
    assert error.code() == grpc.StatusCode.INTERNAL
    assert error.details().startswith("internal error ")
    assert "secret" not in error.details()


async def test_a_refused_request_leaves_others_alone(stack):
    stack.engine.pause()
    call = stack.stub.Generate(generate())
    await refusal(stack.stub.Generate(generate("")))
    stack.engine.resume()
    outputs = [response.output async for response in call]
    assert outputs[-1].finish_reason


async def test_a_message_over_the_limit_is_refused():
    async with (
        FakeEngine() as engine,
        frontend_stack(engine, max_message_bytes=2**16) as stack,
    ):
        error = await refusal(stack.stub.Generate(generate("x" * 2**17)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        # Small enough for the client's message, too large for the engine's.
        large = generate(sampling={"structured_output": {"regex": "x" * (2**16 - 90)}})
        error = await refusal(stack.stub.Generate(large))
        assert error.code() == INVALID
        assert [response async for response in stack.stub.Generate(generate())]


def test_every_error_has_a_status():
    assert set(STATUS_CODES) == set(FrontendError.__subclasses__())
