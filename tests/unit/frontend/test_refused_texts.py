"""Refused texts cost their key tokens, and take no memory while they wait."""

import contextlib

import grpc
import pytest

from protos.frontend.v1 import frontend_pb2 as pb
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack
from tests.support.waiting import until
from tests.unit.frontend.rpc.test_session import EXHAUSTED, INVALID, Answers, cancel, part

KEYS = {name: f"{name}-0123456789abcdef" for name in ("mallory", "bob")}
LIMITS = "tokens_per_minute = 1000\nmax_live_requests = 1"


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


@contextlib.asynccontextmanager
async def stack_of(tmp_path, **config: object):
    path = tmp_path / "keys.toml"
    entries = [f'[keys.{name}]\nkey = "{key}"\n{LIMITS}\n' for name, key in KEYS.items()]
    path.write_text("".join(entries))
    config |= {"api_keys_file": path}
    async with FakeEngine() as engine, frontend_stack(engine, **config) as stack:
        yield stack


async def refusal(stack, text: str, **options: object) -> grpc.aio.AioRpcError | None:
    """Asks as mallory, and returns the error if it is refused."""
    request = pb.GenerateRequest(text=text, options=pb.GenerationOptions(**options))
    try:
        async for _ in stack.stub.Generate(request, metadata=tuple(bearer("mallory").items())):
            pass
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized_and_paid_for(tmp_path):
    async with stack_of(tmp_path) as stack:
        error = await refusal(stack, "x" * 20_000)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "at least" in error.details()
        assert (await refusal(stack, "hi")).code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_text_that_is_cut_may_have_any_length(tmp_path):
    async with stack_of(tmp_path) as stack:
        assert await refusal(stack, "hello " * 20_000, truncate_prompt_tokens=5) is None


async def test_whatever_is_refused_as_invalid_is_paid_for(tmp_path):
    async with stack_of(tmp_path, http_port=0) as stack, stack.http_client() as http:
        body = b'{"model": "fake", "prompt": 1, "user": "' + b"x" * 8000 + b'"}'
        codes = []
        for _ in range(2):
            answer = await http.post(
                "/v1/completions",
                content=body,
                headers=bearer("mallory") | {"content-type": "application/json"},
            )
            codes.append(answer.status_code)
        assert codes == [400, 429]


async def test_texts_that_wait_are_counted_as_they_lie_in_memory(tmp_path):
    async with stack_of(tmp_path, http_port=0, max_prompt_bytes=100) as stack:
        async with stack.http_client() as http:
            # An emoji makes all characters of its text take four bytes.
            prompts = ["\U0001f600" + "x" * 96] * 32
            answer = await http.post(
                "/v1/completions",
                json={"model": "fake", "prompt": prompts},
                headers=bearer("mallory"),
            )
        assert answer.status_code == 429
        assert "texts that are being tokenized" in answer.text
        assert not [name for name in stack.server._counts._held if name.startswith("text")]


async def test_the_first_part_of_a_prompt_takes_the_requests_place(tmp_path):
    async with stack_of(tmp_path) as stack:
        metadata = tuple(bearer("mallory").items())
        first, second = (stack.stub.Session(metadata=metadata) for _ in range(2))
        await first.write(part(1, "one"))
        answers = Answers(first)
        await first.write(part(2, "one"))
        await answers.read_until_over(2)
        assert answers.failure[2].code == EXHAUSTED
        await second.write(part(1, "one"))
        others = Answers(second)
        await others.read_until_over(1)
        assert "unfinished requests" in others.failure[1].message
        await first.write(cancel(1))
        await answers.read_until_over(1)
        others.failure.clear()
        await second.write(part(1, "one", last=True))
        await others.read_until_over(1)
        assert others.text[1] == "hello world"


@pytest.mark.parametrize("end", ["cancel", "leave", "overflow"])
async def test_parts_that_never_become_a_prompt_are_paid_for_and_freed(tmp_path, end):
    async with stack_of(tmp_path, max_prompt_bytes=8000) as stack:
        call = stack.stub.Session(metadata=tuple(bearer("mallory").items()))
        answers = Answers(call)
        await call.write(part(1, "x" * 7000))
        if end == "cancel":
            await call.write(cancel(1))
            await answers.read_until_over(1)
        elif end == "overflow":
            await call.write(part(1, "x" * 7000))
            await answers.read_until_over(1)
            assert answers.failure[1].code == INVALID
        else:
            await call.done_writing()
            await answers.read_until_over(1)
        error = await refusal(stack, "hi")
        assert "tokens per minute" in error.details()
        held = stack.server._counts._held
        assert not [name for name in held if name.startswith(("prompt_part", "requests"))]


async def test_tokenizing_takes_a_place_and_is_free(tmp_path):
    async with stack_of(tmp_path) as stack:
        metadata = tuple(bearer("mallory").items())
        call = stack.stub.Session(metadata=metadata)
        await call.write(part(1, "one"))
        await until(lambda: stack.server._counts.held("prompt_part_bytes"))
        with pytest.raises(grpc.aio.AioRpcError, match="unfinished requests"):
            await stack.stub.Tokenize(pb.TokenizeRequest(text="x"), metadata=metadata)
        call.cancel()
