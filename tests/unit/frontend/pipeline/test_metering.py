"""However a stream ends, its request's place comes back and its tokens are paid."""

import asyncio

import pytest

from services.frontend.access.caller import Caller, Lease
from services.frontend.access.key_file import Limits
from services.frontend.engine_client.messages import ABORTED, STOP, TokenBatch
from services.frontend.errors import EngineUnavailableError, OverloadedError, UnauthenticatedError
from services.frontend.pipeline.generation import Generation
from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.output_text import OutputText
from services.frontend.text.stop_strings import StopStrings
from services.transport.counts import LocalCounts


class Script:
    """A stream that yields what it was given, or raises it."""

    def __init__(self, *batches: TokenBatch | Exception) -> None:
        self._batches = list(batches)
        self.num_aborts = 0

    async def read(self) -> TokenBatch:
        if not self._batches:
            await asyncio.Event().wait()
        batch = self._batches.pop(0)
        if isinstance(batch, Exception):
            raise batch
        return batch

    def abort(self) -> None:
        self.num_aborts += 1
        self._batches.append(TokenBatch(finish_reason=ABORTED))


@pytest.fixture
def caller() -> Caller:
    return Caller("alice", Limits(max_live_requests=1), counts=LocalCounts(), account="a")


def metered(script: Script, lease: Lease) -> Generation:
    text = OutputText(Detokenizer([b"x"] * 9), StopStrings(()))
    return Generation("r", script, text, lease=lease, prompt_token_ids=[1])


def batch(*token_ids: int, **fields: object) -> TokenBatch:
    made = TokenBatch(**fields)
    made.token_ids += token_ids
    return made


async def test_the_last_batch_frees_the_slot(caller):
    stream = metered(Script(batch(1), batch(2, finish_reason=STOP)), caller.begin())
    await anext(stream)
    with pytest.raises(OverloadedError):
        caller.begin()
    await anext(stream)
    caller.begin()


async def test_a_failure_an_abort_and_a_reader_that_leaves_give_it_back(caller):
    failing = metered(Script(EngineUnavailableError("gone")), caller.begin())
    with pytest.raises(EngineUnavailableError):
        await anext(failing)
    metered(Script(), caller.begin()).close()
    reading = asyncio.ensure_future(anext(metered(Script(), caller.begin())))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    caller.begin()


async def test_several_streams_of_one_request_share_its_slot(caller):
    lease = caller.begin()
    streams = [metered(Script(batch(1, finish_reason=STOP)), lease) for _ in range(2)]
    await anext(streams[0])
    with pytest.raises(OverloadedError):
        caller.begin()
    await anext(streams[1])
    caller.begin()


async def test_a_removed_key_aborts_all_streams_also_those_that_wait(caller):
    lease, scripts = caller.begin(), [Script(batch(1)), Script()]
    streams = [metered(script, lease) for script in scripts]
    await anext(streams[0])
    caller.revoke()
    for stream, script in zip(streams, scripts, strict=True):
        assert script.num_aborts == 1
        with pytest.raises(UnauthenticatedError):
            await anext(stream)


async def test_output_is_paid_for_as_it_comes():
    counts = LocalCounts(clock=lambda: 0.0)
    caller = Caller("alice", Limits(tokens_per_minute=10), counts=counts, account="a")
    stream = metered(Script(batch(1, 2, 3), batch(4, finish_reason=STOP)), caller.begin())
    await anext(stream)
    await anext(stream)
    caller.begin().charge_prompt(6)
    with pytest.raises(OverloadedError):
        caller.begin()
