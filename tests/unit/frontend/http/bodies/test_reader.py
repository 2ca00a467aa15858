"""Large bodies are read in a process, which costs one request at most when it fails."""

import asyncio
import json
import os
import signal

import pytest

from services.frontend.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from services.frontend.http.app import PARSERS
from services.frontend.http.bodies import reader as body_reader
from services.frontend.http.bodies.call import Call
from services.frontend.http.bodies.reader import (
    INLINE_BODY_BYTES,
    INLINE_MARKS,
    MAX_WAITING_BYTES,
    BodyReader,
    is_small,
)
from services.frontend.http.bodies.worker import MAX_CONTAINERS, MAX_KEYS, check_structure
from services.frontend.http.chat.calls import read_chat
from services.frontend.http.completions.calls import read_completion
from services.transport.counts import LocalCounts
from tests.support.forked_helpers import helpers_forked
from tests.support.loop_time import LoopTime
from tests.support.started_processes import note_started_processes
from tests.support.waiting import until

LONG_TIMEOUT_S = 60.0
MAX_PROMPT_TOKENS = 10_000


@pytest.fixture(autouse=True)
def _helpers():
    with helpers_forked():
        yield


@pytest.fixture
async def reader(monkeypatch):
    """A reader whose process may be slow, and fails at bodies that say so."""
    monkeypatch.setattr(body_reader, "START_TIMEOUT_S", LONG_TIMEOUT_S)
    monkeypatch.setattr(body_reader, "READ_TIMEOUT_S", LONG_TIMEOUT_S)
    monkeypatch.setattr(body_reader, "_WORKER", "tests.support.faulty_body_worker")
    made = BodyReader(PARSERS, max_prompt_bytes=2**20, max_samples=4, counts=LocalCounts())
    yield made
    await made.close()


@pytest.fixture
def started(monkeypatch):
    """The processes that are started, oldest first."""
    return note_started_processes(monkeypatch)


def completion(prompt="x", **fields) -> bytes:
    return json.dumps({"model": "m", "prompt": prompt} | fields).encode()


def large(prompt="x", **fields) -> bytes:
    return completion(prompt, **fields) + b" " * INLINE_BODY_BYTES


def chat(parameters: bytes) -> bytes:
    return (
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function",'
        b'"function":{"name":"a","parameters":' + parameters + b"}}]}"
    )


async def read(reader: BodyReader, body: bytes, parse=read_completion, account="") -> Call:
    return await reader.read(parse, body, "id", account, max_prompt_tokens=MAX_PROMPT_TOKENS)


def test_what_is_read_on_the_event_loop_is_bounded_in_bytes_and_in_marks():
    assert is_small(b'"' + b"a" * (INLINE_BODY_BYTES - 2) + b'"')
    assert not is_small(b'"' + b"a" * (INLINE_BODY_BYTES - 1) + b'"')
    for mark in (b"{", b"[", b",", b":", b"\\u007b"):
        assert is_small(mark * INLINE_MARKS)
        assert not is_small(mark * (INLINE_MARKS + 1))


async def test_the_process_reads_what_would_be_read_here(reader):
    body = large("text", logit_bias={"3": 1.0}, seed=4, n=2, echo=True)
    assert await read(reader, body) == read_completion(body, "id")
    body = chat(b'{"x":[' + b"1.5," * INLINE_MARKS + b"{}]}")
    assert await read(reader, body, read_chat) == read_chat(body, "id")
    tokens = [1] * 9_999
    assert (await read(reader, completion(tokens))).prompt == tokens


async def test_a_small_body_starts_no_process(reader, started):
    assert (await read(reader, completion())).prompt == "x"
    assert not started


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chat(b'{"x":[' + b"{}," * MAX_CONTAINERS + b"{}]}"), "over 65536 objects and lists"),
        (chat(b'{"x":[' + b"[]," * MAX_CONTAINERS + b"{}]}"), "over 65536 objects and lists"),
        (chat(b"{" + b'"a":1,' * MAX_KEYS + b'"a":1}'), "over 131072 keys"),
        (completion([1] * 10_000), "the prompt is too long: 10000 tokens"),
        (completion([1] * 1_200_000), "over 1179648 entries"),
        (completion("x" * (2**20 + 1)), "the prompt has 1048577 bytes; the limit is 1048576"),
        (chat(b'{"x":[' + b"{}," * 40_000 + b"{}]}"), "the conversation holds over 32768 values"),
        (chat(b'{"x":[' + b"9" * 4000 + b"," + b"1," * 5000 + b"{}]}"), "a number of 13288 bits"),
        (large(model="m" * 2000), "model: String should have at most 1024 characters"),
        (large(cache_salt="m" * 200), "cache_salt: String should have at most 128 characters"),
        (large(n=5), "n is 5; it must be 1 to 4"),
        (large(made_up=1), "made_up is not supported"),
        (b"[" * (2**20 + 1), "over 65536 objects and lists"),
        (b"{" + b" " * 2**20, "the body cannot be read"),
        (b"\xff" * (2**20 + 1), "the body cannot be read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_holds_too_much_is_refused(reader, body, message):
    parse = read_chat if b'"messages"' in body else read_completion
    with pytest.raises(InvalidRequestError, match=message):
        await read(reader, body, parse)


async def test_a_refusal_names_the_field(reader):
    with pytest.raises(InvalidRequestError) as refusal:
        await read(reader, large(made_up=1))
    assert refusal.value.field == "made_up"


def test_marks_inside_strings_do_not_count():
    check_structure(completion(r'{"a": [1, 2, 3]}, \"quoted\" ' * MAX_KEYS))


async def test_a_process_that_dies_costs_the_request_that_it_dies_of(reader):
    waiting = [
        asyncio.create_task(read(reader, large(prompt))) for prompt in ("first", "die", "last")
    ]
    first, died, last = await asyncio.gather(*waiting, return_exceptions=True)
    assert (first.prompt, last.prompt) == ("first", "last")
    assert isinstance(died, InvalidRequestError)


async def test_a_process_that_died_between_two_bodies_costs_nothing(reader, started):
    await read(reader, large())
    [process] = started
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    assert (await read(reader, large("again"))).prompt == "again"


async def test_a_process_that_hangs_costs_the_request_that_it_hangs_at(reader, started):
    await read(reader, large())
    clock = LoopTime()
    hanging = asyncio.create_task(read(reader, large("hang")))
    [process] = started
    while not hanging.done():
        clock.wind(LONG_TIMEOUT_S)
        await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="took over 60 s"):
        await hanging
    await process.wait()
    with clock.stopped():
        assert (await read(reader, large("next"))).prompt == "next"


@pytest.mark.parametrize("error", [OSError("no memory"), RuntimeError("uvloop's")])
async def test_a_process_that_cannot_be_started_costs_one_request(reader, monkeypatch, error):
    async def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "create_subprocess_exec", fail)
        with pytest.raises(EngineUnavailableError, match="process for large bodies"):
            await read(reader, large())
    assert (await read(reader, large("next"))).prompt == "next"


async def test_where_no_process_begins_only_large_bodies_are_refused(monkeypatch):
    monkeypatch.setattr(body_reader, "_WORKER", "no.such.module")
    reader = BodyReader(PARSERS, max_prompt_bytes=2**20, max_samples=4, counts=LocalCounts())
    with pytest.raises(EngineUnavailableError):
        await read(reader, large())
    assert (await read(reader, completion("small"))).prompt == "small"
    await reader.close()


async def test_a_caller_that_leaves_does_not_leave_an_answer_to_the_next_one(reader, started):
    left = asyncio.create_task(read(reader, large("left")))
    await until(lambda: started)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    assert (await read(reader, large("next"))).prompt == "next"


async def test_waiting_bytes_are_limited():
    counts = LocalCounts()
    reader = BodyReader(PARSERS, max_prompt_bytes=1, max_samples=1, counts=counts)
    assert counts.take("large_body_bytes", MAX_WAITING_BYTES - 10, limit=None)
    with pytest.raises(OverloadedError, match="bytes of large bodies wait") as refusal:
        await read(reader, large())
    assert refusal.value.retry_after_ms is not None
    assert (await read(reader, completion())).prompt == "x"


async def test_accounts_take_turns(reader):
    ends: list[object] = []

    async def end(name: str) -> None:
        ends.append((await read(reader, large(name), account=name[0])).prompt)

    await asyncio.gather(*map(end, ["a1", "a2", "a3", "a4", "b1"]))
    assert ends == ["a1", "a2", "b1", "a3", "a4"]


async def test_what_waited_is_given_back():
    counts = LocalCounts()
    reader = BodyReader(PARSERS, max_prompt_bytes=1, max_samples=1, counts=counts)
    await reader.close()
    with pytest.raises(EngineUnavailableError):
        await read(reader, large())
    await until(lambda: counts.held("large_body_bytes") == 0)
