"""Many requests over one client's stream."""

import contextlib

import grpc
import pytest

from protos.common.v1.failure_pb2 import Failure
from protos.common.v1.sampling_pb2 import FinishReason, SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from tests.support.byte_tokenizer import reference_tokenizer
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import frontend_stack
from tests.support.waiting import until

ABORTED = FinishReason.FINISH_REASON_ABORTED
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]
ALREADY_EXISTS = grpc.StatusCode.ALREADY_EXISTS.value[0]
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


def generate(handle: int, text: str = "one two", **options: object) -> pb.SessionRequest:
    request = pb.GenerateRequest(text=text, options=pb.GenerationOptions(**options))
    return pb.SessionRequest(handle=handle, generate=request)


def part(handle: int, text: str, *, last: bool = False, **options: object) -> pb.SessionRequest:
    said = pb.GenerationOptions(**options) if options else None
    return pb.SessionRequest(
        handle=handle, prompt_part=pb.PromptPart(text=text, last=last, options=said)
    )


def cancel(handle: int) -> pb.SessionRequest:
    return pb.SessionRequest(handle=handle, cancel=pb.Cancel())


class Answers:
    """Reads a session and sorts what comes by handle."""

    def __init__(self, call) -> None:
        self.call = call
        self.text: dict[int, str] = {}
        self.last: dict[int, pb.Output] = {}
        self.failure: dict[int, Failure] = {}

    async def read(self) -> None:
        response = await self.call.read()
        assert response is not grpc.aio.EOF, "the stream ended"
        handle = response.handle
        assert handle not in self.failure, "something came after a failure"
        if response.WhichOneof("message") == "failure":
            self.failure[handle] = response.failure
            return
        self.text[handle] = self.text.get(handle, "") + response.output.text
        if response.output.finish_reason:
            self.last[handle] = response.output

    async def read_until_over(self, *handles: int) -> None:
        while not all(handle in self.last or handle in self.failure for handle in handles):
            await self.read()


@contextlib.asynccontextmanager
async def session(engine: FakeEngine, **config: object):
    async with engine, frontend_stack(engine, **config) as stack:
        call = stack.stub.Session()
        yield stack, call, Answers(call)


async def test_requests_run_side_by_side_and_end_by_themselves():
    async with session(FakeEngine()) as (stack, call, answers):
        stack.engine.pause()
        for handle in (7, 0, 3):
            await call.write(generate(handle))
        chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
        await call.write(pb.SessionRequest(handle=9, chat=chat))
        await until(lambda: len(stack.engine.live) == 4)
        stack.engine.resume()
        await answers.read_until_over(7, 0, 3, 9)
        assert answers.text == dict.fromkeys((7, 0, 3, 9), "hello world")
        assert all(output.usage.output_tokens == 3 for output in answers.last.values())


async def test_a_half_closed_session_finishes_its_requests_and_ends_well():
    async with session(FakeEngine()) as (_, call, answers):
        await call.write(generate(1))
        await call.done_writing()
        await answers.read_until_over(1)
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK


async def test_a_handle_is_free_again_once_its_request_has_ended():
    async with session(FakeEngine()) as (_, call, answers):
        for _ in range(3):
            await call.write(generate(1))
            answers.last.clear()
            await answers.read_until_over(1)
        assert not answers.failure


async def test_a_prompt_may_come_in_parts():
    async with session(FakeEngine()) as (stack, call, answers):
        await call.write(part(1, "hello wor", stop=["world"], request_id="parts"))
        await call.write(part(2, "one"))
        await call.write(part(1, "ld, how are"))
        await call.write(part(1, " you", last=True))
        await answers.read_until_over(1)
        [submit] = stack.engine.submits
        assert submit.request_id == "parts"
        expected = reference_tokenizer().encode("hello world, how are you").ids
        assert len(submit.prompt_token_ids) == 4 * len(expected)
        assert answers.last[1].stop_string == "world"


async def test_options_in_a_later_part_are_refused():
    async with session(FakeEngine()) as (_, call, answers):
        await call.write(part(1, "a"))
        await call.write(part(1, "b", priority=1))
        await answers.read_until_over(1)
        assert answers.failure[1].code == INVALID


async def test_parts_are_bounded_together():
    async with session(FakeEngine(), max_prompt_bytes=10) as (_, call, answers):
        await call.write(part(1, "123456"))
        await call.write(part(1, "123456", last=True))
        await answers.read_until_over(1)
        assert "12 bytes; the limit is 10" in answers.failure[1].message


async def test_prompts_in_parts_are_bounded_over_the_whole_session():
    async with session(FakeEngine(), max_prompt_bytes=10) as (_, call, answers):
        for handle in range(17):
            await call.write(part(handle, "1234567890"))
        await answers.read_until_over(16)
        assert answers.failure[16].code == EXHAUSTED
        assert "160 bytes" in answers.failure[16].message
        await call.write(cancel(0))
        await answers.read_until_over(0)
        await call.write(part(17, "1234567890"))
        await call.write(cancel(17))
        await answers.read_until_over(17)
        assert answers.last[17].finish_reason == ABORTED


async def test_a_prompt_without_its_last_part_fails_when_the_client_ends():
    async with session(FakeEngine()) as (_, call, answers):
        await call.write(part(1, "a"))
        await call.done_writing()
        await answers.read_until_over(1)
        assert "last part" in answers.failure[1].message
        assert await call.read() is grpc.aio.EOF


async def test_a_cancelled_request_ends_with_what_it_cost_and_alone():
    async with session(FakeEngine(script=says("one two three"))) as (stack, call, answers):
        stack.engine.pause()
        await call.write(generate(1, request_id="first"))
        await call.write(generate(2))
        # The frontend, too, has to know that the engine has them.
        await until(lambda: sum(stack.server.requests.counts.submit.counts) == 2)
        await call.write(cancel(1))
        await answers.read_until_over(1)
        assert answers.last[1].finish_reason == ABORTED
        assert answers.last[1].usage.prompt_tokens == 2
        assert stack.engine.aborted == ["first"]
        stack.engine.resume()
        await answers.read_until_over(2)
        assert answers.text[2] == "one two three"


async def test_a_request_may_be_cancelled_right_after_its_submission():
    async with session(FakeEngine()) as (stack, call, answers):
        stack.engine.pause()
        for handle in range(1, 6):
            await call.write(generate(handle))
            await call.write(cancel(handle))
        await answers.read_until_over(*range(1, 6))
        assert {output.finish_reason for output in answers.last.values()} == {ABORTED}
        await until(lambda: not stack.engine.live)
        await until(lambda: stack.server.engine.num_live == 0)


async def test_a_prompt_in_parts_may_be_cancelled():
    async with session(FakeEngine()) as (_, call, answers):
        await call.write(part(1, "a"))
        await call.write(cancel(1))
        await answers.read_until_over(1)
        assert answers.last[1].finish_reason == ABORTED


async def test_cancelling_what_has_ended_is_no_error():
    async with session(FakeEngine()) as (_, call, answers):
        await call.write(cancel(1))
        await call.write(generate(2))
        await answers.read_until_over(2)
        assert not answers.failure


@pytest.mark.parametrize("again", [generate(1), part(1, "more")])
async def test_using_a_live_handle_again_ends_its_request_alone(again):
    async with session(FakeEngine()) as (stack, call, answers):
        stack.engine.pause()
        await call.write(generate(1, request_id="first"))
        await call.write(generate(2))
        await until(lambda: sum(stack.server.requests.counts.submit.counts) == 2)
        await call.write(again)
        await answers.read_until_over(1)
        assert answers.failure[1].code == ALREADY_EXISTS
        assert stack.engine.aborted == ["first"]
        stack.engine.resume()
        await answers.read_until_over(2)
        assert answers.text[2] == "hello world"


async def test_requests_fail_alone_and_in_words():
    async with session(FakeEngine()) as (stack, call, answers):
        await call.write(generate(1, ""))
        await call.write(generate(2, model="other"))
        await call.write(pb.SessionRequest(handle=3))
        unknown = pb.SessionRequest.FromString(generate(4).SerializeToString() + b"\xfa\x3f\x01x")
        await call.write(unknown)
        await call.write(generate(5, sampling=SamplingParams(max_tokens=1)))
        await answers.read_until_over(1, 2, 3, 4, 5)
        codes = {handle: failure.code for handle, failure in answers.failure.items()}
        assert codes == {1: INVALID, 2: 5, 3: INVALID, 4: INVALID}
        stack.engine.rejection = Failure(code=8, message="full", retry_after_ms=9)
        await call.write(generate(6))
        await answers.read_until_over(6)
        assert answers.failure[6].retry_after_ms == 9


async def test_failures_that_callers_may_not_see_are_an_id_on_a_session_too():
    async with session(FakeEngine(rejection=Failure(code=13, message="secret"))) as (
        _,
        call,
        answers,
    ):
        await call.write(generate(1))
        await answers.read_until_over(1)
        assert answers.failure[1].code == grpc.StatusCode.INTERNAL.value[0]
        assert "secret" not in answers.failure[1].message


async def test_live_requests_are_limited():
    async with session(FakeEngine(), max_live_requests=2) as (stack, call, answers):
        stack.engine.pause()
        for handle in (1, 2, 3):
            await call.write(generate(handle))
        await answers.read_until_over(3)
        assert answers.failure[3].code == EXHAUSTED
        stack.engine.resume()
        await answers.read_until_over(1, 2)


async def test_a_client_that_leaves_ends_all_its_requests():
    async with session(FakeEngine()) as (stack, call, _):
        stack.engine.pause()
        for handle in range(5):
            await call.write(generate(handle))
        await until(lambda: len(stack.engine.live) == 5)
        call.cancel()
        await until(lambda: len(stack.engine.aborted) == 5)
        await until(lambda: stack.server.engine.num_live == 0)


async def test_a_draining_frontend_finishes_a_sessions_requests_and_refuses_new_ones():
    async with session(FakeEngine()) as (stack, call, answers):
        stack.engine.pause()
        await call.write(generate(1))
        await until(lambda: stack.engine.live)
        stack.server.begin_drain()
        await call.write(generate(2))
        await answers.read_until_over(2)
        assert answers.failure[2].code == grpc.StatusCode.UNAVAILABLE.value[0]
        stack.engine.resume()
        await answers.read_until_over(1)
        assert answers.text[1] == "hello world"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_message_that_holds_too_much_costs_its_own_request_alone():
    engine = FakeEngine()
    engine.pause()
    async with engine, frontend_stack(engine) as stack:
        answers = Answers(stack.stub.Session())
        await answers.call.write(generate(1))
        await until(lambda: len(engine.live) == 1)
        await answers.call.write(generate(2, stop=["a"] * 20_000))
        await answers.read_until_over(2)
        assert answers.failure[2].code == INVALID
        assert answers.failure[2].message == "the message has over 16384 fields"
        # A second message of a live request ends that request.
        await answers.call.write(generate(3))
        await until(lambda: len(engine.live) == 2)
        await answers.call.write(generate(3, stop=["a"] * 20_000))
        await answers.read_until_over(3)
        engine.resume()
        await answers.read_until_over(1)
        assert answers.text[1] == "hello world"


async def test_a_message_that_holds_too_much_and_names_no_request_ends_the_stream():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        call = stack.stub.Session()
        await call.write(pb.SessionRequest(generate=generate(0, stop=["a"] * 20_000).generate))
        with pytest.raises(grpc.aio.AioRpcError, match="over 16384 fields") as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
