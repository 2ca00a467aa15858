"""A constraint beside threads that are busy, fail, or answer after its request has ended."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.engine.errors import InvalidRequestError, QueueFullError, RequestFaultError
from services.engine.grammar.constraint import GrammarConstraint
from tests.support.passing_time import pass_time
from tests.support.waiting import until

TIMEOUT_S = 60.0


class Matcher:
    """A matcher that allows one token for ever, once it may."""

    def __init__(self, error=None):
        self.may_go_on = threading.Event()
        self.error = error
        self.has_begun = False

    def consume_token(self, token_id):
        self.has_begun = True
        self.may_go_on.wait()
        if self.error is not None:
            raise self.error

    def compute_bitmask(self):
        return b"\1\0\0\0"

    def is_error(self):
        return False

    def is_stopped(self):
        return False


class Watched:
    """A constraint and what it has called."""

    def __init__(self, threads, matcher):
        self.calls = []
        self.constraint = GrammarConstraint(
            matcher,
            b"\1\0\0\0",
            threads=threads,
            timeout_s=TIMEOUT_S,
            on_failure=lambda: self.calls.append("failure"),
            on_close=lambda: self.calls.append("close"),
        )
        self.constraint.listen(lambda: self.calls.append("mask"), self.calls.append)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture
def matcher():
    matcher = Matcher()
    yield matcher
    matcher.may_go_on.set()


async def test_a_mask_that_comes_after_the_request_has_ended_goes_nowhere(threads, matcher):
    watched = Watched(threads, matcher)
    watched.constraint.advance(0)
    await until(lambda: matcher.has_begun)
    watched.constraint.close()
    watched.constraint.close()
    watched.constraint.advance(0)
    matcher.may_go_on.set()
    await asyncio.wrap_future(threads.submit(lambda: None))
    await asyncio.sleep(0)
    assert watched.calls == ["close"]
    assert watched.constraint.mask is None


async def test_work_of_ended_requests_holds_no_thread(threads, matcher):
    busy, ended, waiting = Watched(threads, matcher), Watched(threads, Matcher()), Matcher()
    busy.constraint.advance(0)
    ended.constraint.advance(0)
    ended.constraint.close()
    waiting.may_go_on.set()
    last = Watched(threads, waiting)
    last.constraint.advance(0)
    matcher.may_go_on.set()
    await until(lambda: last.calls == ["mask"])
    assert ended.calls == ["close"]


async def test_a_request_that_waits_for_busy_threads_is_not_to_blame(threads, matcher, monkeypatch):
    slow, waiting = Watched(threads, matcher), Watched(threads, matcher)
    slow.constraint.advance(0)
    await until(lambda: matcher.has_begun)
    waiting.constraint.advance(0)
    pass_time(monkeypatch, TIMEOUT_S)
    await until(lambda: slow.calls and waiting.calls)
    assert slow.calls[0] == "failure"
    assert isinstance(slow.calls[1], InvalidRequestError)
    [error] = waiting.calls
    assert isinstance(error, QueueFullError)


class PanicError(BaseException):
    """Stands for a panic of the Rust library, which is no Exception."""


async def test_a_panic_of_the_library_ends_its_request_alone(threads):
    broken = Matcher(PanicError("index out of bounds"))
    broken.may_go_on.set()
    watched = Watched(threads, broken)
    watched.constraint.advance(0)
    await until(lambda: len(watched.calls) == 2)
    assert watched.calls[0] == "failure"
    assert isinstance(watched.calls[1], RequestFaultError)
    whole = Matcher()
    whole.may_go_on.set()
    other = Watched(threads, whole)
    other.constraint.advance(0)
    await until(lambda: other.calls == ["mask"])
