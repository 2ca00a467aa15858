"""The clients of a soak: they generate, chat, follow grammars, send long prompts, cancel, read
slowly, ask for nonsense, share sessions and speak HTTP, well and badly."""

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable

import grpc

from protos.common.v1.sampling_pb2 import SamplingParams, StructuredOutput, TextChoice
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.varied_prompts import varied_prompts

CALL_TIMEOUT_S = 240.0
PROMPTS = [text for text, _ in varied_prompts(64, seed=7)]
GRAMMARS = (
    StructuredOutput(json_object=True),
    StructuredOutput(regex="[a-z]{3,20}( [0-9]{1,4}){0,3}"),
    StructuredOutput(choice=TextChoice(texts=["yes", "no", "perhaps not"])),
    StructuredOutput(
        json_schema=json.dumps(
            {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name", "age"],
                "additionalProperties": False,
            }
        )
    ),
)
BAD_REQUESTS = (
    pb.GenerateRequest(text=""),
    pb.GenerateRequest(text="x", options=pb.GenerationOptions(model="no-such-model")),
    pb.GenerateRequest(
        text="x", options=pb.GenerationOptions(sampling=SamplingParams(temperature=-1))
    ),
    pb.GenerateRequest(tokens=pb.TokenIds(ids=[2**31])),
    pb.GenerateRequest(
        text="x",
        options=pb.GenerationOptions(
            sampling=SamplingParams(structured_output=StructuredOutput(regex="(unclosed"))
        ),
    ),
)
BAD_BODIES = (
    b"{",
    b"[]",
    b'{"model": 7}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
)


class Load:
    """Clients of one frontend; each method runs one piece of work and returns how it ended."""

    def __init__(self, address: str, http_port: int, rng: random.Random) -> None:
        self._address = address
        self._http_port = http_port
        self._rng = rng

    def kinds(self) -> dict[str, tuple[Callable[[], Awaitable[str]], int]]:
        """Returns each kind of work and how many clients do it."""
        return {
            "generate": (self.generate, 4),
            "chat": (self.chat, 4),
            "structured": (self.structured, 4),
            "long prompt": (self.long_prompt, 2),
            "cancel": (self.cancel, 3),
            "slow reader": (self.slow_reader, 2),
            "bad request": (self.bad_request, 1),
            "session": (self.session, 2),
            "http": (self.http, 3),
            "bad http": (self.bad_http, 1),
        }

    def _options(self, max_tokens: int = 64, **sampling: object) -> pb.GenerationOptions:
        temperature = self._rng.choice([0, 0.8, 1.5])
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, **sampling)
        return pb.GenerationOptions(sampling=params, priority=self._rng.choice([0, 0, 1]))

    def _request(self, max_tokens: int = 64) -> pb.GenerateRequest:
        text = self._rng.choice(PROMPTS)
        return pb.GenerateRequest(options=self._options(max_tokens), text=text)

    @contextlib.asynccontextmanager
    async def _stub(self):
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._address, options=options) as channel:
            yield FrontendServiceStub(channel)

    async def _read(self, call: grpc.aio.UnaryStreamCall) -> str:
        async for _ in call:
            pass
        return "finished"

    async def generate(self) -> str:
        """Reads an output to its end, sometimes several of one prompt."""
        async with self._stub() as stub:
            request = self._request(self._rng.choice([1, 8, 64, 200]))
            if self._rng.random() < 0.2:
                request.options.n = 3
            return await self._read(stub.Generate(request, timeout=CALL_TIMEOUT_S))

    async def chat(self) -> str:
        """Reads an answer to its end."""
        async with self._stub() as stub:
            messages = [pb.ChatMessage(role="user", content=self._rng.choice(PROMPTS))]
            request = pb.ChatRequest(options=self._options(), messages=messages)
            return await self._read(stub.Chat(request, timeout=CALL_TIMEOUT_S))

    async def structured(self) -> str:
        """Reads an output that follows a grammar, of which one in four was never seen before."""
        grammar = self._rng.choice(GRAMMARS)
        if self._rng.random() < 0.25:
            grammar = StructuredOutput(regex=f"[a-z]{{1,{self._rng.randint(2, 10_000)}}}")
        async with self._stub() as stub:
            options = self._options(structured_output=grammar)
            request = pb.GenerateRequest(options=options, text=self._rng.choice(PROMPTS))
            return await self._read(stub.Generate(request, timeout=CALL_TIMEOUT_S))

    async def long_prompt(self) -> str:
        """Sends a prompt near the model's limit, which shares no prefix with a cached one."""
        ids = [self._rng.randrange(3, 1000) for _ in range(self._rng.randint(500, 1900))]
        async with self._stub() as stub:
            request = pb.GenerateRequest(options=self._options(8), tokens=pb.TokenIds(ids=ids))
            return await self._read(stub.Generate(request, timeout=CALL_TIMEOUT_S))

    async def cancel(self) -> str:
        """Goes away after some messages, or hangs up altogether."""
        async with self._stub() as stub:
            call = stub.Generate(self._request(400), timeout=CALL_TIMEOUT_S)
            num_left = self._rng.randint(0, 20)
            async for _ in call:
                num_left -= 1
                if num_left < 0:
                    if self._rng.random() < 0.5:
                        call.cancel()
                    return "cancelled"
        return "finished"

    async def slow_reader(self) -> str:
        """Reads a message now and then."""
        async with self._stub() as stub:
            async for _ in stub.Generate(self._request(200), timeout=CALL_TIMEOUT_S):
                await asyncio.sleep(self._rng.uniform(0, 0.3))
        return "finished"

    async def bad_request(self) -> str:
        """Asks for what is refused."""
        await asyncio.sleep(self._rng.uniform(0, 0.2))
        async with self._stub() as stub:
            return await self._read(
                stub.Generate(self._rng.choice(BAD_REQUESTS), timeout=CALL_TIMEOUT_S)
            )

    async def session(self) -> str:
        """Runs several requests over one stream, cancels one, and repeats a handle."""
        async with self._stub() as stub:
            call = stub.Session(timeout=CALL_TIMEOUT_S)
            live = set(range(1, 9))
            for handle in live:
                request = self._request(self._rng.randint(1, 99))
                await call.write(pb.SessionRequest(handle=handle, generate=request))
            await call.write(pb.SessionRequest(handle=1, cancel=pb.Cancel()))
            while live:
                response = await call.read()
                if response is grpc.aio.EOF:
                    return "session ended"
                if response.HasField("failure") or response.output.finish_reason:
                    live.discard(response.handle)
            await call.done_writing()
            return "finished"

    async def http(self) -> str:
        """Asks for a completion over HTTP, as a stream or not; half of the streams are cut."""
        is_stream = self._rng.random() < 0.5
        body = {"model": "tiny", "prompt": self._rng.choice(PROMPTS), "max_tokens": 48}
        content = json.dumps(body | {"stream": is_stream, "temperature": 0.8}).encode()
        is_cut = is_stream and self._rng.random() < 0.5
        return await self._post("/v1/completions", content, max_bytes=200 if is_cut else None)

    async def bad_http(self) -> str:
        """Sends bodies that are refused, of a wrong length, or not to their end."""
        await asyncio.sleep(self._rng.uniform(0, 0.2))
        content = self._rng.choice(BAD_BODIES)
        num_bytes = len(content) + self._rng.choice([0, 0, 7])
        return await self._post("/v1/chat/completions", content, num_bytes=num_bytes)

    async def _post(
        self,
        path: str,
        content: bytes,
        *,
        num_bytes: int | None = None,
        max_bytes: int | None = None,
    ) -> str:
        """Posts a body and reads the answer, or `max_bytes` of it; returns its status."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http_port)
        try:
            head = (
                f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                f"content-length: {num_bytes or len(content)}\r\nconnection: close\r\n\r\n"
            )
            writer.write(head.encode() + content)
            await writer.drain()
            if num_bytes is not None and num_bytes > len(content):
                await asyncio.sleep(self._rng.uniform(0, 1))
                return "body not sent"
            line = await reader.readline()
            await reader.read(-1 if max_bytes is None else max_bytes)
            return f"http {line.split()[1].decode()}" if line else "http closed"
        finally:
            writer.close()
