"""The service that a benchmark sends its requests to."""

import random
from collections.abc import AsyncIterator
from typing import Protocol, Self

import grpc

from protos.common.v1 import sampling_pb2
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from services.client.bench.workload import PlannedRequest
from services.client.channel import OPEN, PLAIN, Access, Tls, open_channel
from services.client.client import OctavoClient
from services.client.errors import error_of_call
from services.client.requests import Options, Sampling

WORDS = """time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book eye
job word business issue side kind head house service friend father power hour game line end
""".split()  # noqa: SIM905  a word list reads better as prose
NUM_POOL_WORDS = 20_000
"""Length of the text that prompts are cut from."""


class Target(Protocol):
    """Where requests go."""

    def stream(self, request: PlannedRequest) -> AsyncIterator[int]:
        """Sends a request and yields the number of tokens in each message of its output."""
        ...


class FrontendTarget:
    """Sends text to a frontend, so that tokenizing is part of what is measured."""

    def __init__(self, address: str, seed: int, access: Access = OPEN) -> None:
        self.name = f"frontend {address}"
        self._client = OctavoClient(address, access=access)
        self._rng = random.Random(seed)
        self._pool: list[str] = []

    async def __aenter__(self) -> Self:
        text = " ".join(self._rng.choice(WORDS) for _ in range(NUM_POOL_WORDS))
        self._pool = [token.text for token in await self._client.tokenize(text)]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._client.close()

    async def stream(self, request: PlannedRequest) -> AsyncIterator[int]:
        """Sends a piece of the pool that has about as many tokens as planned."""
        latest = max(0, len(self._pool) - request.prompt_tokens)
        start = random.Random(request.seed).randint(0, latest)
        prompt = "".join(self._pool[start : start + request.prompt_tokens])
        sampling = Sampling(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
        async for chunk in self._client.generate(prompt, Options(sampling=sampling)):
            yield len(chunk.token_ids)


class EngineTarget:
    """Sends token ids straight to an engine."""

    def __init__(self, address: str, tls: Tls = PLAIN) -> None:
        self.name = f"engine {address}"
        self._channel = open_channel(address, tls)
        self._stub = engine_pb2_grpc.EngineServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        self._vocab_size = 0

    async def __aenter__(self) -> Self:
        try:
            info = await self._stub.GetModelInfo(engine_pb2.GetModelInfoRequest())
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from None
        self._vocab_size = info.vocab_size
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._channel.close()

    async def stream(self, request: PlannedRequest) -> AsyncIterator[int]:
        """Sends random token ids."""
        rng = random.Random(request.seed)
        call = self._stub.Generate(
            engine_pb2.GenerateRequest(
                prompt_token_ids=rng.choices(range(self._vocab_size), k=request.prompt_tokens),
                sampling=sampling_pb2.SamplingParams(
                    temperature=0, max_tokens=request.output_tokens, ignore_eos=True
                ),
            )
        )
        try:
            async for response in call:
                yield len(response.token_ids)
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from None
