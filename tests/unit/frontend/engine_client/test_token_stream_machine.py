"""Whatever befalls engines, in whatever order: a request's tokens come once and in their order."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from protos.common.v1.sampling_pb2 import FinishReason
from protos.engine.v1.engine_pb2 import Finished
from services.frontend.engine_client.addresses import EngineAddress
from services.frontend.engine_client.messages import (
    EngineRequest,
    ModelInfo,
    TokenSink,
    pack_uint32,
)
from services.frontend.engine_client.pool import PoolLimits
from services.frontend.engine_client.routing_counts import RoutingCounts
from services.frontend.engine_client.token_stream import TokenStream
from services.frontend.errors import EngineUnavailableError, FrontendError, OverloadedError

OUTPUT = list(range(100, 130))
PROMPT = [1, 2, 3]
MAX_ATTEMPTS = 3
LOST = EngineUnavailableError("lost")
FULL = OverloadedError("full", retry_after_ms=None)


@dataclass(eq=False)
class ScriptedEngine:
    """Makes some tokens, in batches, and then ends in its own way."""

    num_tokens: int
    batch_size: int
    error: FrontendError
    address: EngineAddress = field(default_factory=lambda: EngineAddress("engine:1"))

    def serve(self, request: EngineRequest, sink: TokenSink) -> None:
        given_tokens = np.frombuffer(request.prompt_token_ids, "<u4").tolist()
        start = request.num_resumed_tokens
        assert given_tokens == PROMPT + OUTPUT[:start]
        asyncio.get_running_loop().create_task(self._talk(sink, OUTPUT[start:]))

    async def _talk(self, sink: TokenSink, tokens: list[int]) -> None:
        made = tokens[: self.num_tokens]
        for start in range(0, len(made), self.batch_size):
            sink.put(made[start : start + self.batch_size], ())
            await asyncio.sleep(0)
        if len(made) < len(tokens):
            sink.put_error(self.error)
        else:
            sink.put_finished(Finished(handle=1, finish_reason=FinishReason.FINISH_REASON_LENGTH))


@dataclass
class ScriptedPool:
    """Sends a request to one engine after the other."""

    unused: Iterator[ScriptedEngine]
    limits: PoolLimits = field(default_factory=lambda: PoolLimits(max_attempts=MAX_ATTEMPTS))
    counts: RoutingCounts = field(default_factory=RoutingCounts)
    num_used: int = 0
    swapper: None = None

    def send(
        self,
        request: EngineRequest,
        sink: TokenSink,
        *,
        model: ModelInfo,
        tried: Collection[ScriptedEngine],
    ) -> tuple[ScriptedEngine, Callable[[], None]]:
        del model
        engine = next(self.unused, None)
        if engine is None:
            raise EngineUnavailableError("no engine")
        assert engine not in tried
        self.num_used += 1
        engine.serve(request, sink)
        return engine, lambda: None


engines = st.builds(
    ScriptedEngine,
    num_tokens=st.integers(0, len(OUTPUT)),
    batch_size=st.integers(1, 9),
    error=st.sampled_from([LOST, FULL]),
)


async def run(scripts: list[ScriptedEngine]) -> tuple[list[int], FrontendError | None, int]:
    """Returns the tokens that came, the error at the end if there was one, and engines used."""
    pool = ScriptedPool(iter(scripts))
    request = EngineRequest(request_id="r", prompt_token_ids=pack_uint32(PROMPT))
    stream = TokenStream(pool, request, model=ModelInfo(max_model_len=1024))
    tokens: list[int] = []
    try:
        await stream.admitted()
        while True:
            batch = await stream.read()
            tokens += batch.token_ids
            if batch.finish_reason is not None:
                return tokens, None, pool.num_used
    except FrontendError as error:
        return tokens, error, pool.num_used
    finally:
        assert pool.counts.num_retries + pool.counts.num_migrations == pool.num_used - 1


@given(st.lists(engines, min_size=1, max_size=8))
def test_tokens_come_once_and_in_order_or_the_loss_is_reported(scripts):
    tokens, error, num_used = asyncio.run(run(scripts))
    assert tokens == OUTPUT[: len(tokens)]
    assert (error is None) == (tokens == OUTPUT)
    if error is not None:
        barren = [engine.num_tokens == 0 for engine in scripts[:num_used]][1 - MAX_ATTEMPTS :]
        assert num_used == len(scripts) or all(barren)
        assert error is scripts[num_used - 1].error


@given(st.lists(engines, min_size=1, max_size=8), st.integers(1, 9))
def test_engines_that_each_make_some_tokens_bring_a_request_to_its_end(scripts, batch_size):
    for engine in scripts:
        engine.num_tokens = max(1, engine.num_tokens)
    last = ScriptedEngine(len(OUTPUT), batch_size, LOST)
    tokens, error, _ = asyncio.run(run([*scripts, last]))
    assert (tokens, error) == (OUTPUT, None)
