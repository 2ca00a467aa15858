"""The two endpoints that run the model."""

import asyncio
import dataclasses
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from services.frontend.engine_client.messages import ABORTED, Usage
from services.frontend.errors import EngineUnavailableError
from services.frontend.http.answers import Answer, ChatAnswer, CompletionAnswer
from services.frontend.http.body_reader import BodyReader, Reader
from services.frontend.http.live_requests import LiveRequests
from services.frontend.http.status import RefusedCallError
from services.frontend.http.writer import ResponseWriter
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.request import Output, Prompt
from services.frontend.pipeline.request_log import RequestRecord
from services.frontend.pipeline.samples import Samples
from services.telemetry.tracing import TRACEPARENT, checked_traceparent

BODY_TIMEOUT_S = 30.0
"""A body that takes longer to arrive is refused."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells one of the endpoints from the other."""

    method: str
    """Its name in the log."""
    id_prefix: str
    reader: Reader
    """What reads its bodies."""
    answer_class: Callable[..., Answer]


COMPLETION = Kind("HttpCompletion", "cmpl-", "completion", CompletionAnswer)
CHAT = Kind("HttpChat", "chatcmpl-", "chat", ChatAnswer)


class GenerationEndpoint:
    """An ASGI application for one endpoint, so that it sees its client go away."""

    def __init__(
        self,
        kind: Kind,
        pipeline: Pipeline,
        live: LiveRequests,
        bodies: BodyReader,
        *,
        slow_reader_timeout_s: float,
    ) -> None:
        self._kind = kind
        self._bodies = bodies
        self._pipeline = pipeline
        self._live = live
        self._max_body_bytes = bodies.max_bytes
        self._slow_reader_timeout_s = slow_reader_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        request_id = self._kind.id_prefix + uuid.uuid4().hex
        writer = ResponseWriter(
            send, timeout_s=self._slow_reader_timeout_s, headers={"x-request-id": request_id}
        )
        try:
            with self._live.place():
                request = Request(scope, receive)
                body = await _read_body(request, max_bytes=self._max_body_bytes)
                traceparent = checked_traceparent(request.headers.get(TRACEPARENT, ""))
                work = self._serve(body, request_id, writer, traceparent=traceparent)
                await self._live.run(receive, work)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  the edge: everything becomes a status
            await writer.fail(error)

    async def _serve(
        self, body: bytes, request_id: str, writer: ResponseWriter, *, traceparent: str
    ) -> None:
        with self._pipeline.requests.watch(
            request_id, method=self._kind.method, traceparent=traceparent
        ) as record:
            call = await self._bodies.read(
                self._kind.reader,
                body,
                request_id,
                max_prompt_tokens=self._pipeline.max_prompt_tokens,
            )
            model = self._pipeline.model_named(call.options.model)
            sampling = call.options.sampling
            generation = await self._pipeline.start(call.prompt, call.options, record=record)
            # A generator that nobody has begun to read closes nothing.
            with closing(generation):
                # Only now: it has a place for each of n samples, and n was checked just before.
                answer = self._kind.answer_class(
                    request_id,
                    model,
                    has_logprobs=sampling is not None and sampling.HasField("logprobs"),
                    tells_prompt=call.tells_prompt,
                    streams_usage=call.includes_usage,
                    num_samples=call.options.num_samples,
                )
                if call.has_echo and isinstance(answer, CompletionAnswer):
                    token_ids = generation.prompt_token_ids
                    answer.echo(await self._prompt_text(call.prompt, token_ids), token_ids)
                async with aclosing(_outputs(generation, record)) as outputs:
                    if call.is_stream:
                        await _write_stream(answer, outputs, writer, with_usage=call.includes_usage)
                    else:
                        await writer.write(answer.whole(await _joined(outputs)))

    async def _prompt_text(self, prompt: Prompt, token_ids: Sequence[int]) -> str:
        """Returns a prompt as it was given; token ids as the text that they are."""
        if isinstance(prompt, str):
            return prompt
        return await self._pipeline.detokenize("", token_ids, show_special_tokens=False)


async def _outputs(
    generation: Generation | Samples, record: RequestRecord
) -> AsyncGenerator[Output, None]:
    """Goes through a request's outputs."""
    async for output in generation:
        record.observe(output)
        if output.finish_reason == ABORTED:  # nobody here asked for it
            raise EngineUnavailableError("the engine ended the request")
        yield output


async def _write_stream(
    answer: Answer, outputs: AsyncIterator[Output], writer: ResponseWriter, *, with_usage: bool
) -> None:
    await writer.start_events()
    for body in answer.opening():
        await writer.write_event(body)
    usage = Usage()
    async for output in outputs:
        is_worth_telling = output.text or output.logprobs or output.prompt_logprobs
        if is_worth_telling or output.finish_reason is not None:
            await writer.write_event(answer.chunk(output))
        usage = output.usage or usage
    if with_usage:
        await writer.write_event(answer.usage_chunk(usage))
    await writer.end_events()


async def _joined(outputs: AsyncIterator[Output]) -> list[Output]:
    """Returns each of a request's outputs as one, in the order of their indices."""
    pieces: defaultdict[int, list[Output]] = defaultdict(list)
    usage = None
    async for output in outputs:
        pieces[output.index].append(output)
        usage = output.usage
    return [
        dataclasses.replace(
            own[-1],
            text="".join(piece.text for piece in own),
            token_ids=[token_id for piece in own for token_id in piece.token_ids],
            logprobs=[position for piece in own for position in piece.logprobs],
            prompt_logprobs=[position for piece in own for position in piece.prompt_logprobs],
            usage=usage,
        )
        for _, own in sorted(pieces.items())
    ]


async def _read_body(request: Request, *, max_bytes: int) -> bytes:
    """Reads a body of JSON.

    Raises:
        RefusedCallError: it is no JSON, is too large, or does not arrive.
        ClientDisconnect: the client went away.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # web pages can send other types to any address
        raise RefusedCallError(415, "the content type must be application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise RefusedCallError(413, f"the body is over the limit of {max_bytes} bytes")
    except TimeoutError:
        raise RefusedCallError(408, f"the body did not come in {BODY_TIMEOUT_S} s") from None
    return bytes(body)
