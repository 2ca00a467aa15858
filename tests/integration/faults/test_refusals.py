"""Everything that is refused, through both real services, while another caller's stream goes on."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from protos.common.v1.sampling_pb2 import FinishReason, SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.transport.status import RETRY_PUSHBACK
from tests.support.held import worker_of
from tests.support.pace import frozen, stopped, until_live
from tests.support.processes import Stack, stack
from tests.support.steered_engine import LEAST_PUSHBACK_MS, MODULE, stop_after
from tests.support.waiting import until

MAX_MESSAGE_BYTES = 8 * 2**20
MAX_PROMPT_BYTES = 6 * 2**20
GRPC_DEFAULT_BYTES = 4 * 2**20
"""Largest message that gRPC takes by default."""
CONTEXT = 2048
VOCABULARY = 1024
UNKNOWN_FIELD = b"\xfa\x3f\x01x"
"""Field 1023, one byte long."""

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
FRONTEND = "octavo.frontend.v1.FrontendService"

Request = pb.GenerateRequest | pb.ChatRequest
Case = tuple[Request, grpc.StatusCode, tuple[str, ...]]


def generate(text: str = "Once upon a time", **options: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, options=pb.GenerationOptions(**options))


def chat(*messages: tuple[str, str]) -> pb.ChatRequest:
    return pb.ChatRequest(
        messages=[pb.ChatMessage(role=role, content=content) for role, content in messages]
    )


def tokens(*ids: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=ids))


def sampled(**values: object) -> pb.GenerateRequest:
    return generate(sampling=SamplingParams(**values))


def with_unknown_field(request: Request, *path: str) -> Request:
    """The request, with a field that the contract does not have in the message at `path`."""
    target = request
    for name in path:
        target = getattr(target, name)
        target.SetInParent()
    target.MergeFromString(UNKNOWN_FIELD)
    return request


def out_of_range() -> Iterator[tuple[str, Case]]:
    """Every sampling value just outside its range, on each side that it has."""
    for name, value, limits in [
        ("temperature", -0.5, "[0, 100]"),
        ("temperature", 100.5, "[0, 100]"),
        ("temperature", math.nan, "[0, 100]"),
        ("top_p", 0, "(0, 1]"),
        ("top_p", 1.5, "(0, 1]"),
        ("min_p", -0.5, "[0, 1]"),
        ("min_p", 1.5, "[0, 1]"),
        ("repetition_penalty", 0, "[0.0625, 10]"),
        ("repetition_penalty", 10.5, "[0.0625, 10]"),
        ("frequency_penalty", -2.5, "[-2, 2]"),
        ("frequency_penalty", 2.5, "[-2, 2]"),
        ("presence_penalty", -2.5, "[-2, 2]"),
        ("presence_penalty", 2.5, "[-2, 2]"),
        ("max_tokens", 0, "at least 1"),
        ("logprobs", 21, "[0, 20]"),
    ]:
        yield f"{name} {value}", (sampled(**{name: value}), INVALID, (name, str(value), limits))


CASES: dict[str, Case] = {
    **dict(out_of_range()),
    "min_tokens over max_tokens": (
        sampled(min_tokens=9, max_tokens=8), INVALID, ("min_tokens is 9", "[0, 8]"),
    ),
    "logit_bias value": (
        sampled(logit_bias={5: 100.5}), INVALID, ("logit_bias[5] is 100.5", "[-100, 100]"),
    ),
    "logit_bias size": (
        sampled(logit_bias=dict.fromkeys(range(1025), 1.0)), INVALID, ("logit_bias", "1024"),
    ),
    "logit_bias token": (
        sampled(logit_bias={VOCABULARY: 1.0}), INVALID, ("logit_bias", str(VOCABULARY)),
    ),
    "stop_token_ids size": (
        sampled(stop_token_ids=[5] * 65), INVALID, ("stop_token_ids has 65 entries", "64"),
    ),
    "stop_token_ids token": (
        sampled(stop_token_ids=[VOCABULARY]), INVALID, ("stop_token_ids", str(VOCABULARY)),
    ),
    "model": (generate(model="gpt"), NOT_FOUND, ("'gpt'", "'tiny'")),
    "model that is no name": (generate(model="\u4e2d" * 10**6), NOT_FOUND, ("\u4e2d" * 9, "...")),
    "prompt absent": (pb.GenerateRequest(), INVALID, ("the prompt is empty",)),
    "prompt empty": (generate(""), INVALID, ("the prompt is empty",)),
    "prompt without tokens": (tokens(), INVALID, ("the prompt is empty",)),
    "prompt token": (tokens(VOCABULARY), INVALID, (f"{VOCABULARY} is not below {VOCABULARY}",)),
    "prompt as long as the context": (
        tokens(*[5] * CONTEXT), INVALID, (f"{CONTEXT} tokens > {CONTEXT}",),
    ),
    "prompt bytes": (
        generate("x" * (MAX_PROMPT_BYTES + 1)),
        INVALID,
        (f"{MAX_PROMPT_BYTES + 1} bytes", f"limit is {MAX_PROMPT_BYTES}"),
    ),
    "messages": (chat(), INVALID, ("0 messages", "at least 1")),
    "too many messages": (chat(*[("user", "")] * 4097), INVALID, ("4097", "4096")),
    "role": (chat(("robot", "hi")), INVALID, ("robot",)),
    "role that is no name": (chat(("r" * 10**6, "hi")), INVALID, ("rrr", "...")),
    "cache_salt": (generate(cache_salt="x" * 129), INVALID, ("cache_salt has 129", "128")),
    "stop strings": (generate(stop=["x"] * 17), INVALID, ("17 strings", "16")),
    "stop string": (generate(stop=["x" * 257]), INVALID, ("257 bytes", "256")),
    "stop string empty": (generate(stop=[""]), INVALID, ("0 bytes", "1 to 256")),
    "request_id": (generate(request_id="x" * 129), INVALID, ("129 characters", "128")),
    "unknown field": (with_unknown_field(generate()), INVALID, ("GenerateRequest", "1023")),
    "unknown field in options": (
        with_unknown_field(generate(), "options"), INVALID, ("GenerationOptions", "1023"),
    ),
    "unknown field in sampling": (
        with_unknown_field(generate(), "options", "sampling"), INVALID, ("SamplingParams", "1023"),
    ),
}  # fmt: skip
OVERSIZE = generate("x" * (MAX_MESSAGE_BYTES + 1))
"""Refused by gRPC itself, which ends the call; no case, for it would end a session's stream."""


@pytest.fixture(scope="module")
def services(stop_file) -> Iterator[Stack]:
    """Both services, with room for two running requests and one that waits."""
    limits = {"max_message_bytes": MAX_MESSAGE_BYTES}
    room = {"max_num_seqs": 2, "max_num_waiting": 1}
    with stack(
        engine={"module": MODULE, "stop_file": stop_file, **limits, **room},
        frontend={**limits, "max_prompt_bytes": MAX_PROMPT_BYTES, "log_format": "json"},
    ) as running:
        yield running


@pytest.fixture
async def stub(services: Stack) -> AsyncIterator[FrontendServiceStub]:
    async with connected(services) as client:
        yield client


@contextlib.asynccontextmanager
async def connected(
    services: Stack, *, retried: grpc.StatusCode | None = None, max_attempts: int = 5
) -> AsyncIterator[FrontendServiceStub]:
    """A client, with gRPC's own retries of one status if it is given."""
    options: list[tuple[str, int | str]] = [("grpc.max_send_message_length", -1)]
    if retried is not None:
        policy = {
            "maxAttempts": max_attempts,
            # Below some milliseconds gRPC 1.84 may never send the second attempt.
            "initialBackoff": "0.02s",
            "maxBackoff": "0.02s",
            "backoffMultiplier": 1,
            "retryableStatusCodes": [retried.name],
        }
        config = {"methodConfig": [{"name": [{"service": FRONTEND}], "retryPolicy": policy}]}
        options.append(("grpc.service_config", json.dumps(config)))
    async with grpc.aio.insecure_channel(services.frontend.address, options=options) as channel:
        yield FrontendServiceStub(channel)


def call(stub: FrontendServiceStub, request: Request) -> grpc.aio.UnaryStreamCall:
    method = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Generate
    return method(request)


async def refused(stub: FrontendServiceStub, request: Request) -> grpc.aio.AioRpcError:
    """Sends what must be refused before any message."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(stub, request).read()
    return caught.value


def long_request(max_tokens: int = 1000, **options: object) -> pb.GenerateRequest:
    sampling = SamplingParams(temperature=1, seed=7, max_tokens=max_tokens, ignore_eos=True)
    return generate("Tell me a story.", sampling=sampling, **options)


async def all_tokens(stream: grpc.aio.UnaryStreamCall) -> tuple[list[int], int]:
    """Reads a stream to its end: its tokens and its finish reason."""
    outputs = [response.output async for response in stream]
    token_ids = [token for output in outputs for token in output.token_ids]
    return token_ids, outputs[-1].finish_reason


@pytest.mark.parametrize("name", CASES)
async def test_a_call_is_refused_with_value_and_limit_before_any_token(stub, name):
    request, code, parts = CASES[name]
    error = await refused(stub, request)
    assert error.code() == code
    assert [part for part in parts if part not in error.details()] == [], error.details()


async def test_a_session_refuses_the_same_under_each_handle_and_goes_on(stub):
    session = stub.Session()
    for handle, (request, _, _) in enumerate(CASES.values()):
        kind = "chat" if isinstance(request, pb.ChatRequest) else "generate"
        await session.write(pb.SessionRequest(handle=handle, **{kind: request}))
    failures = {}
    for _ in CASES:
        response = await session.read()
        assert response.HasField("failure")
        failures[response.handle] = response.failure
    for handle, (_, code, parts) in enumerate(CASES.values()):
        assert failures[handle].code == code.value[0]
        assert all(part in failures[handle].message for part in parts)
    await session.write(pb.SessionRequest(handle=1, generate=sampled(max_tokens=1)))
    assert (await session.read()).HasField("output")


async def test_a_message_over_the_limit_is_refused_and_one_past_grpcs_default_is_not(stub):
    error = await refused(stub, OVERSIZE)
    assert error.code() == EXHAUSTED
    assert str(MAX_MESSAGE_BYTES) in error.details()
    # A prompt this long reaches the tokenizer, and only the context is too short for it.
    error = await refused(stub, generate("x " * (GRPC_DEFAULT_BYTES // 2 + 1)))
    assert error.code() == INVALID
    assert f"tokens > {CONTEXT}, which prompt and output together may have" in error.details()
    # A regex goes on to the engine as it is, which refuses it: it has passed both hops.
    large = sampled(max_tokens=2)
    num_bytes = 2**20 - 16  # the frontend takes 1 MiB, the engine less
    large.options.sampling.structured_output.regex = "x" * num_bytes
    error = await refused(stub, large)
    assert error.code() == INVALID
    assert f"regex has {num_bytes} bytes" in error.details()


async def test_a_live_requests_id_and_handle_are_taken(services, stub):
    with frozen(worker_of(services.engine)):
        live = stub.Generate(long_request(request_id="the-same"))
        await live.initial_metadata()  # the engine has it
        error = await refused(stub, long_request(request_id="the-same"))
    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert "'the-same'" in error.details()
    assert (await live.read()).output.token_ids
    live.cancel()


async def test_a_refusal_is_a_status_alone_which_clients_may_retry(services):
    # gRPC retries only what ended without headers; what the frontend logs counts the attempts.
    request = sampled(temperature=-1)
    request.options.request_id = "tried-twice"
    async with connected(services, retried=INVALID, max_attempts=2) as stub:
        assert (await refused(stub, request)).code() == INVALID

    def events() -> list[str]:
        lines = [line for line in services.frontend.log.splitlines() if "tried-twice" in line]
        return [json.loads(line)["event"] for line in lines]

    await until(lambda: len(events()) >= 2)  # a thread writes the log
    assert events() == ["request_failed"] * 2


async def test_a_full_queue_says_when_to_come_back_and_a_client_that_listens_is_served(
    services, stop_file
):
    async with (
        connected(services) as stub,
        connected(services, retried=EXHAUSTED) as retrying,
    ):
        # The engine says how long to wait by how often requests have ended.
        assert [each async for each in stub.Generate(sampled(max_tokens=1))]
        await until_live(services.engine, 0)
        stop_after(stop_file, 5)
        with frozen(worker_of(services.engine)):
            occupants = [stub.Generate(long_request()) for _ in range(2)]
            await until_live(services.engine, 2)
        async with stopped(services.engine):  # both run
            occupants.append(stub.Generate(long_request()))
            await occupants[-1].initial_metadata()  # it waits in the queue
            error = await refused(stub, generate())
            assert error.code() == EXHAUSTED
            assert "1 requests wait; the limit is 1" in error.details()
            pushback_ms = int(dict(error.trailing_metadata())[RETRY_PUSHBACK])
            assert LEAST_PUSHBACK_MS <= pushback_ms <= 5000
            started_s = time.monotonic()
            served = retrying.Generate(sampled(max_tokens=1))
            await until(lambda: services.frontend.log.count("OverloadedError") >= 2)
            for occupant in occupants:
                occupant.cancel()
        _, reason = await all_tokens(served)
        assert reason == FinishReason.FINISH_REASON_LENGTH
        # Its own backoff is shorter.
        assert time.monotonic() - started_s >= LEAST_PUSHBACK_MS / 1000


async def test_a_long_stream_runs_to_its_end_undisturbed_by_every_refusal(
    services, stub, stop_file
):
    alone = await all_tokens(stub.Generate(long_request(300)))
    stop_after(stop_file, 290)  # so that it does not end before the last refusal
    beside = stub.Generate(long_request(300, request_id="healthy"))
    await beside.initial_metadata()  # the engine has it
    reading = asyncio.create_task(all_tokens(beside))
    requests = [request for request, _, _ in CASES.values()]
    requests += [OVERSIZE, long_request(request_id="healthy")]
    await asyncio.gather(*(refused(stub, request) for request in requests))
    async with stopped(services.engine):
        assert not reading.done()
    assert await reading == alone
    assert len(alone[0]) == 300
