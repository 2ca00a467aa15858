"""A frontend without a model: it answers with the words it was given.

    async with FakeFrontend() as fake:
        client = OctavoClient(fake.address)

A word is a token, its id is its length. A prompt whose first word is FAIL is refused with the
`failure` set here; one whose first word is HANG gets its first word back and no more until it is
cancelled; one whose first word is CUT gets a stream that ends without a finish reason. A chat's
message whose first word is CALL gets reasoning and a call of the tool that the second word names.
Vectors are the number of words, and -0.5; scores the number of words of the document.
"""

import asyncio
import contextlib
import queue
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import grpc

from protos.common.v1 import failure_pb2, sampling_pb2
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc

MODEL = "echo"


class FakeFrontend(frontend_pb2_grpc.FrontendServiceServicer):
    """Serves on a free loopback port while its context lasts."""

    def __init__(self) -> None:
        self.model = MODEL
        self.failure = failure_pb2.Failure(code=8, message="the queue is full", retry_after_ms=250)
        self.options: list[frontend_pb2.GenerationOptions] = []
        self.time_limits_s: list[float | None] = []
        self.chats: list[frontend_pb2.ChatRequest] = []
        self.conversations: list[list[tuple[str, str]]] = []
        self.vector_requests: list[Any] = []
        self.was_cancelled = asyncio.Event()
        self._server = grpc.aio.server()
        frontend_pb2_grpc.add_FrontendServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(grace=None)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802  named by the contract
        self._record(request.options, context)
        async for output in self._answer(_prompt(request), request.options, context):
            yield frontend_pb2.GenerateResponse(output=output)

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802  named by the contract
        self._record(request.options, context)
        self.chats.append(request)
        self.conversations.append([(item.role, item.content) for item in request.messages])
        async for output in self._answer(_text(request.messages[-1]), request.options, context):
            yield frontend_pb2.ChatResponse(output=output)

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802  named by the contract
        responses: asyncio.Queue[Any] = asyncio.Queue()
        reader = asyncio.create_task(self._read_session(requests, responses))
        try:
            while (response := await responses.get()) is not None:
                yield response
        finally:
            reader.cancel()

    async def Embed(self, request: Any, context: Any) -> Any:  # noqa: N802  named by the contract
        self.vector_requests.append(request)
        self.time_limits_s.append(context.time_remaining())
        prompts = [each.text.split() or list(each.tokens.ids) for each in request.inputs]
        vectors = [[len(words), -0.5][: request.dimensions or 2] for words in prompts]
        return frontend_pb2.EmbedResponse(
            vectors=b"".join(struct.pack(f"<{len(each)}f", *each) for each in vectors),
            size=request.dimensions or 2,
            usage=sampling_pb2.Usage(prompt_tokens=sum(map(len, prompts))),
        )

    async def Score(self, request: Any, context: Any) -> Any:  # noqa: N802  named by the contract
        self.vector_requests.append(request)
        scores = [len(text.split()) for text in request.documents]
        usage = sampling_pb2.Usage(prompt_tokens=sum(scores))
        return frontend_pb2.ScoreResponse(scores=scores, usage=usage)

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802  named by the contract
        messages = request.conversation.messages
        text = " ".join(f"{item.role} {item.content}" for item in messages) or request.text
        words = text.split()
        tokens = [word if i == 0 else f" {word}" for i, word in enumerate(words)]
        return frontend_pb2.TokenizeResponse(token_ids=[len(w) for w in words], tokens=tokens)

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802  named by the contract
        return frontend_pb2.DetokenizeResponse(text=" ".join("x" * n for n in request.token_ids))

    async def ListModels(self, request: Any, context: Any) -> Any:  # noqa: N802  named by the contract
        card = frontend_pb2.ModelCard(
            name=self.model,
            max_model_len=64,
            ready=True,
            architecture="EchoForCausalLM",
            default_sampling=sampling_pb2.SamplingParams(temperature=0.5, top_k=20),
        )
        return frontend_pb2.ListModelsResponse(models=[card])

    def _record(self, options: Any, context: Any) -> None:
        self.options.append(options)
        self.time_limits_s.append(context.time_remaining())

    async def _answer(self, prompt: str, options: Any, context: Any) -> AsyncIterator[Any]:
        words = prompt.split()
        if words[0] == "FAIL":
            await context.abort(
                next(code for code in grpc.StatusCode if code.value[0] == self.failure.code),
                self.failure.message,
                (("grpc-retry-pushback-ms", str(self.failure.retry_after_ms)),),
            )
        try:
            async for output in self._outputs(words, options):
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            # The second if gRPC was still sending the last output.
            self.was_cancelled.set()
            raise

    async def _outputs(self, words: list[str], options: Any) -> AsyncIterator[Any]:
        request_id = options.request_id or "drawn"
        limit = options.sampling.max_tokens if options.sampling.HasField("max_tokens") else 1000
        if words[0] == "CALL":
            async for output in _calling(words[1], request_id):
                yield output
            return
        for position, word in enumerate(words[:limit]):
            text = word if position == 0 else f" {word}"
            output = frontend_pb2.Output(request_id=request_id, text=text, token_ids=[len(word)])
            if options.sampling.HasField("logprobs"):
                token = sampling_pb2.TokenLogprob(token_id=len(word), logprob=-0.5)
                output.logprobs.append(sampling_pb2.PositionLogprobs(chosen=token, top=[token]))
            yield output
            if words[0] == "HANG":
                await asyncio.Event().wait()
        if words[0] == "CUT":
            return
        is_cut_short = len(words) > limit
        yield frontend_pb2.Output(
            request_id=request_id,
            finish_reason=sampling_pb2.FINISH_REASON_LENGTH
            if is_cut_short
            else sampling_pb2.FINISH_REASON_STOP,
            stop_token_id=None if is_cut_short else 2,
            usage=sampling_pb2.Usage(
                prompt_tokens=len(words), cached_tokens=1, output_tokens=min(len(words), limit)
            ),
        )

    async def _read_session(self, requests: Any, responses: asyncio.Queue[Any]) -> None:
        parts: dict[int, str] = {}
        running: dict[int, asyncio.Task[None]] = {}
        async for request in requests:
            handle, kind = request.handle, request.WhichOneof("message")
            if kind == "cancel":
                running[handle].cancel()
                continue
            if kind == "prompt_part":
                parts[handle] = parts.get(handle, "") + request.prompt_part.text
                if not request.prompt_part.last:
                    continue
                prompt, options = parts[handle], frontend_pb2.GenerationOptions()
            elif kind == "chat":
                prompt, options = request.chat.messages[-1].content, request.chat.options
            else:
                prompt, options = _prompt(request.generate), request.generate.options
            if prompt == "END":
                await responses.put(None)
                return
            running[handle] = asyncio.create_task(
                self._answer_in_session(handle, prompt, options, responses)
            )

    async def _answer_in_session(
        self, handle: int, prompt: str, options: Any, responses: asyncio.Queue[Any]
    ) -> None:
        def send(**content: Any) -> None:
            responses.put_nowait(frontend_pb2.SessionResponse(handle=handle, **content))

        if prompt.startswith("FAIL"):
            send(failure=self.failure)
            return
        try:
            async for output in self._outputs(prompt.split(), options):
                send(output=output)
        except asyncio.CancelledError:
            self.was_cancelled.set()
            send(output=frontend_pb2.Output(finish_reason=sampling_pb2.FINISH_REASON_ABORTED))


@contextlib.contextmanager
def fake_frontend_in_thread() -> Iterator[FakeFrontend]:
    """Serves from a thread of its own, for code under test that runs its own event loop."""
    started: queue.Queue[Any] = queue.Queue()

    async def serve() -> None:
        stop = asyncio.Event()
        async with FakeFrontend() as fake:
            started.put((fake, stop, asyncio.get_running_loop()))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    fake, stop, loop = started.get()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def _prompt(request: Any) -> str:
    if request.WhichOneof("prompt") == "text":
        return str(request.text)
    return " ".join("x" * token_id for token_id in request.tokens.ids)


def _text(message: Any) -> str:
    return message.content or "".join(part.text for part in message.parts)


async def _calling(tool: str, request_id: str) -> AsyncIterator[Any]:
    yield frontend_pb2.Output(request_id=request_id, reasoning="It needs ", token_ids=[1])
    yield frontend_pb2.Output(request_id=request_id, reasoning="a tool.", token_ids=[1])
    yield frontend_pb2.Output(request_id=request_id, text="Wait.", token_ids=[1])
    for index in range(2):
        begun = frontend_pb2.ToolCallPiece(index=index, id=f"call_{index}", name=tool)
        yield frontend_pb2.Output(request_id=request_id, tool_calls=[begun], token_ids=[1])
        for text in ('{"at": ', f"{index}}}"):
            piece = frontend_pb2.ToolCallPiece(index=index, arguments=text)
            yield frontend_pb2.Output(request_id=request_id, tool_calls=[piece], token_ids=[1])
    usage = sampling_pb2.Usage(prompt_tokens=2, output_tokens=9, reasoning_tokens=2)
    yield frontend_pb2.Output(
        request_id=request_id, finish_reason=sampling_pb2.FINISH_REASON_STOP, usage=usage
    )
