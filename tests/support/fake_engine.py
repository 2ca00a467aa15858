"""An engine service in this process that speaks the session protocol with scripted tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Self

import grpc
import numpy as np

from protos.common.v1.failure_pb2 import Failure
from protos.common.v1.request_story_pb2 import RequestStory, StageTime
from protos.common.v1.sampling_pb2 import (
    FinishReason,
    PositionLogprobs,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.engine.v1.operator_pb2_grpc import (
    OperatorServiceServicer,
    add_OperatorServiceServicer_to_server,
)
from services.frontend.engine_client.prefix_keys import PREFIX_KEY_VERSION
from services.frontend.engine_client.tokenizer_files import tokenizer_sha256
from tests.support.byte_tokenizer import reference_tokenizer, tokenizer_files
from tests.support.processes import free_port

EOS_TOKEN_ID = 1
"""<|im_end|> of the byte tokenizer."""
HEARTBEAT_INTERVAL_S = 0.02

Script = Callable[[list[int]], list[int]]
"""From a prompt's tokens to the output's; one that ends with EOS_TOKEN_ID or a stop token stops. A
request that another engine began resumes after the tokens that it brings."""


def says(text: str, *, eos: bool = True) -> Script:
    """A script that answers everything with one text."""
    tokens = reference_tokenizer().encode(text).ids + ([EOS_TOKEN_ID] if eos else [])
    return lambda prompt: tokens


@dataclass(slots=True)
class _Live:
    submit: engine_pb2.Submit
    prompt: list[int]
    tokens: list[int]
    num_sent: int = 0
    """Of all output tokens, those of another engine included."""


@dataclass(slots=True)
class _Session:
    number: int
    steps_sent: int = 0
    steps_read: int = 0
    begun: dict[bytes, bytes] = field(default_factory=dict)
    """Images of which parts are to come."""


@dataclass
class FakeEngine:
    """Serves scripted requests, one token of each per step, and notes the messages it receives.

    `pause` holds all tokens back until `resume`, `mute` ends heartbeats and tokens while the
    connection stays, `die` breaks every connection at once.
    """

    script: Script = field(default_factory=lambda: says("hello world"))
    engine_id: str = "engine-1"
    model: str = "fake"
    max_model_len: int = 512
    vocab_size: int = 512
    files: dict[str, bytes] = field(default_factory=tokenizer_files)
    credit_window: int = 8
    pooling: engine_pb2.Pooling | None = None
    """Set to answer requests with vectors: the sum of the tokens, their number, and zeros."""
    rejection: Failure | None = None
    """Answer to every submit, when set."""
    failure: Failure | None = None
    """How requests end instead of finishing, when set."""
    is_ready: bool = True
    tokens_per_step: int = 1
    ignores_max_tokens: bool = False
    hold_at: int | None = None
    """Output tokens after which a request gets no more, while this is set."""
    step_s: float = 0.001
    """Time from one step to the next."""
    credentials: grpc.ServerCredentials | None = None
    """TLS of its port; None speaks plain text."""
    block_size: int = 4
    config_sha256: str = "c" * 64
    load: dict[str, int] = field(default_factory=dict)
    """Fields of every heartbeat, such as num_used_blocks."""
    prefixes: engine_pb2.PrefixChanges | None = None
    """Told in the next heartbeat."""
    prefix_key_version: int = PREFIX_KEY_VERSION
    weights_version: str = ""
    """Version of the weights of all that it serves."""
    image_processor: engine_pb2.ImageProcessor | None = None
    """How it wants images; None sees none."""
    part_s: float = 0.0
    """Time from one part of an image to the next message."""
    operator: OperatorServiceServicer | None = None
    """Serves OperatorService beside it."""
    hellos: list[engine_pb2.FrontendHello] = field(default_factory=list)
    heard: list[tuple[str, bytes]] = field(default_factory=list)
    """Kinds of the messages about requests and images, with the digest or request id, in order."""
    images: dict[bytes, tuple[list[int], bytes]] = field(default_factory=dict)
    """Images that the newest session holds: grids and patches by digest."""

    submits: list[engine_pb2.Submit] = field(default_factory=list)
    served_elsewhere: list[str] = field(default_factory=list)
    """Request ids of another frontend, which it remembers too."""
    aborted: list[str] = field(default_factory=list)
    """Request ids of live requests that were aborted."""
    num_sessions: int = 0
    num_asked: int = 0
    """Times that it was asked what it serves."""
    address: str = ""

    def __post_init__(self) -> None:
        self._running = asyncio.Event()
        self._running.set()
        self._is_muted = False
        self._is_draining = False
        self.live: dict[tuple[int, int], _Live] = {}
        """By session and handle."""
        self._session = _Session(0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.die()

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        """Listens on loopback; port 0 takes one that is still free after `die`."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        engine_pb2_grpc.add_EngineServiceServicer_to_server(_Servicer(self), self._server)
        if self.operator is not None:
            add_OperatorServiceServicer_to_server(self.operator, self._server)
        address = f"{host}:{port or free_port()}"
        if self.credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self.credentials)
        self.address = f"{host}:{self.port}"
        await self._server.start()

    async def die(self) -> None:
        """Breaks every connection."""
        await self._server.stop(None)
        self.live.clear()

    @property
    def steps_sent(self) -> int:
        """Steps that the newest session was sent."""
        return self._session.steps_sent

    @property
    def steps_read(self) -> int:
        """Steps of it that were read."""
        return self._session.steps_read

    def pause(self) -> None:
        """Holds tokens back."""
        self._running.clear()

    def resume(self) -> None:
        """Lets tokens flow again."""
        self._running.set()

    def mute(self) -> None:
        """Says nothing more, not even heartbeats."""
        self._is_muted = True

    def unmute(self) -> None:
        """Speaks again on new sessions."""
        self._is_muted = False

    def drain(self) -> None:
        """Announces that no more requests are taken."""
        self._is_draining = True

    # The session, from here on.

    async def talk(self, context: grpc.aio.ServicerContext) -> None:
        hello = await context.read()
        assert hello.hello.frontend_id
        self.hellos.append(hello.hello)
        if self._is_muted:
            await asyncio.Event().wait()
        await context.write(engine_pb2.EngineMessage(hello=self._hello()))
        self.num_sessions += 1
        self.images.clear()
        self._session = session = _Session(self._session.number + 1)
        outgoing: asyncio.Queue[engine_pb2.EngineMessage] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._listen(session, context, outgoing)),
            asyncio.create_task(self._beat(outgoing)),
            asyncio.create_task(self._step(session, outgoing)),
        ]
        try:
            while True:
                message = await outgoing.get()
                if not self._is_muted:
                    await context.write(message)
        finally:
            for task in tasks:
                task.cancel()
            self.num_sessions -= 1
            for key in [key for key in self.live if key[0] == session.number]:
                del self.live[key]

    async def _listen(
        self,
        session: _Session,
        context: grpc.aio.ServicerContext,
        outgoing: asyncio.Queue[engine_pb2.EngineMessage],
    ) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = message.WhichOneof("message")
            if kind == "submit":
                outgoing.put_nowait(self._take(session, message.submit))
            elif kind == "abort":
                self._abort(session, message.abort, outgoing)
            elif kind == "image_part":
                self._take_part(session, message.image_part)
                await asyncio.sleep(self.part_s)
            elif kind == "drop_images":
                for digest in message.drop_images.digests:
                    self.heard.append(("drop", digest))
                    del self.images[digest]
            else:
                session.steps_read = message.credit.steps_read

    def _take_part(self, session: _Session, part: engine_pb2.ImagePart) -> None:
        assert len(part.patches) <= 256 * 2**10
        assert part.digest not in self.images, "the image came before"
        self.heard.append(("part", part.digest))
        session.begun[part.digest] = session.begun.get(part.digest, b"") + part.patches
        if part.grid:
            self.images[part.digest] = list(part.grid), session.begun.pop(part.digest)
            held = sum(len(patches) for _, patches in self.images.values())
            assert held <= self.image_processor.max_image_bytes

    def _hello(self) -> engine_pb2.EngineHello:
        return engine_pb2.EngineHello(
            engine_id=self.engine_id,
            model=self.model,
            credit_window=self.credit_window,
            heartbeat_interval_ms=int(HEARTBEAT_INTERVAL_S * 1000),
        )

    def _take(self, session: _Session, submit: engine_pb2.Submit) -> engine_pb2.EngineMessage:
        self.submits.append(submit)
        self.heard.append(("submit", submit.request_id.encode()))
        assert all(image.digest in self.images for image in submit.images)
        if self.rejection is not None:
            rejected = engine_pb2.Rejected(handle=submit.handle, failure=self.rejection)
            return engine_pb2.EngineMessage(rejected=rejected)
        given = np.frombuffer(submit.prompt_token_ids, "<u4").tolist()
        num_resumed = submit.num_resumed_tokens
        prompt = given[: len(given) - num_resumed]
        tokens = self.script(prompt)
        assert given[len(prompt) :] == tokens[:num_resumed], "another engine made other tokens"
        if submit.sampling.HasField("max_tokens") and not self.ignores_max_tokens:
            tokens = tokens[: submit.sampling.max_tokens]
        self.live[session.number, submit.handle] = _Live(submit, prompt, tokens, num_resumed)
        admitted = engine_pb2.Admitted(handle=submit.handle, weights_version=self.weights_version)
        return engine_pb2.EngineMessage(admitted=admitted)

    def _abort(
        self,
        session: _Session,
        abort: engine_pb2.Abort,
        outgoing: asyncio.Queue[engine_pb2.EngineMessage],
    ) -> None:
        step = engine_pb2.StepOutput()
        for handle in abort.handles:
            if live := self.live.pop((session.number, handle), None):
                self.aborted.append(live.submit.request_id)
                step.finished.append(self._finished(live, FinishReason.FINISH_REASON_ABORTED))
        session.steps_sent += 1
        outgoing.put_nowait(engine_pb2.EngineMessage(step=step))

    async def _beat(self, outgoing: asyncio.Queue[engine_pb2.EngineMessage]) -> None:
        has_announced_drain = False
        while True:
            ready = self.is_ready and not self._is_draining
            blocks = [-(-len(live.prompt) // self.block_size) for live in self.live.values()]
            recent = sum(len(submit.prompt_token_ids) // 4 for submit in self.submits)
            load = {
                "num_running": len(blocks),
                "num_used_blocks": sum(blocks),
                "num_recent_tokens": recent,
                **self.load,
            }
            heartbeat = engine_pb2.Heartbeat(ready=ready, prefixes=self.prefixes, **load)
            self.prefixes = None
            outgoing.put_nowait(engine_pb2.EngineMessage(heartbeat=heartbeat))
            if self._is_draining and not has_announced_drain:
                has_announced_drain = True
                outgoing.put_nowait(engine_pb2.EngineMessage(draining=engine_pb2.Draining()))
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)

    async def _step(
        self, session: _Session, outgoing: asyncio.Queue[engine_pb2.EngineMessage]
    ) -> None:
        clock = asyncio.get_running_loop().time
        next_s = clock()
        while True:
            await self._running.wait()
            has_credit = session.steps_sent - session.steps_read < self.credit_window
            if has_credit and any(number == session.number for number, _ in self.live):
                session.steps_sent += 1
                outgoing.put_nowait(engine_pb2.EngineMessage(step=self._make_step(session)))
            next_s = max(next_s + self.step_s, clock())
            await asyncio.sleep(next_s - clock())

    def _make_step(self, session: _Session) -> engine_pb2.StepOutput:
        step = engine_pb2.StepOutput()
        handles, counts, tokens = [], [], []
        for (number, handle), live in list(self.live.items()):
            if number != session.number:
                continue
            if live.submit.pool:
                del self.live[number, handle]
                step.finished.append(self._pooled(live))
                continue
            end = min(live.num_sent + self.tokens_per_step, self.hold_at or len(live.tokens))
            new = live.tokens[live.num_sent : end]
            if not new:
                continue
            live.num_sent += len(new)
            handles.append(handle)
            counts.append(len(new))
            tokens += new
            if live.submit.sampling.HasField("logprobs"):
                step.logprobs.add(handle=handle, positions=[_logprob(token) for token in new])
            if live.num_sent >= len(live.tokens):
                del self.live[number, handle]
                step.finished.append(self._ending(live))
        step.handles = np.array(handles, "<u4").tobytes()
        step.num_tokens = np.array(counts, "<u4").tobytes()
        step.token_ids = np.array(tokens, "<u4").tobytes()
        return step

    def _pooled(self, live: _Live) -> engine_pb2.Finished:
        if self.failure is not None:
            return engine_pb2.Finished(handle=live.submit.handle, failure=self.failure)
        finished = self._finished(live, FinishReason.FINISH_REASON_STOP)
        vector = np.zeros(self.pooling.size, "<f4")
        vector[:2] = [sum(live.prompt), len(live.prompt)][: self.pooling.size]
        finished.vector = vector.tobytes()
        return finished

    def _ending(self, live: _Live) -> engine_pb2.Finished:
        if self.failure is not None:
            return engine_pb2.Finished(handle=live.submit.handle, failure=self.failure)
        last = live.tokens[-1]
        if last not in (EOS_TOKEN_ID, *live.submit.sampling.stop_token_ids):
            return self._finished(live, FinishReason.FINISH_REASON_LENGTH)
        finished = self._finished(live, FinishReason.FINISH_REASON_STOP)
        finished.stop_token_id = last
        return finished

    def _finished(self, live: _Live, reason: FinishReason) -> engine_pb2.Finished:
        usage = Usage(
            prompt_tokens=len(live.prompt),
            cached_tokens=2,
            output_tokens=live.num_sent,
            weights_version=self.weights_version,
        )
        return engine_pb2.Finished(handle=live.submit.handle, finish_reason=reason, usage=usage)


def _logprob(token_id: int) -> PositionLogprobs:
    return PositionLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=-0.5))


class _Servicer(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def Session(  # noqa: N802
        self, messages: object, context: grpc.aio.ServicerContext
    ) -> None:
        await self._engine.talk(context)

    async def GetModelInfo(  # noqa: N802
        self, request: engine_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.GetModelInfoResponse:
        self._engine.num_asked += 1
        return engine_pb2.GetModelInfoResponse(
            model=self._engine.model,
            architecture="FakeForCausalLM",
            max_model_len=self._engine.max_model_len,
            vocab_size=self._engine.vocab_size,
            eos_token_ids=[EOS_TOKEN_ID],
            default_sampling=SamplingParams(temperature=0.5),
            tokenizer_sha256=tokenizer_sha256(self._engine.files),
            engine_id=self._engine.engine_id,
            block_size=self._engine.block_size,
            prefix_key_version=self._engine.prefix_key_version,
            config_sha256=self._engine.config_sha256,
            image_processor=self._engine.image_processor,
            pooling=self._engine.pooling,
        )

    async def ExplainRequest(  # noqa: N802
        self, request: engine_pb2.ExplainRequestRequest, context: grpc.aio.ServicerContext
    ) -> engine_pb2.ExplainRequestResponse:
        known = [submit.request_id for submit in self._engine.submits]
        if request.request_id not in [*known, *self._engine.served_elsewhere]:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no live request has this id")
        story = RequestStory(
            request_id=request.request_id,
            engine_id=self._engine.engine_id,
            duration_s=2.5,
            stages=[StageTime(stage="REQUEST_STAGE_DECODE", seconds=2.5)],
        )
        return engine_pb2.ExplainRequestResponse(story=story)

    async def GetTokenizer(  # noqa: N802
        self, request: engine_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[engine_pb2.GetTokenizerResponse]:
        for name, content in sorted(self._engine.files.items()):
            for start in range(0, max(1, len(content)), 1000):
                part = content[start : start + 1000]
                yield engine_pb2.GetTokenizerResponse(file_name=name, content=part)
