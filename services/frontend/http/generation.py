"""The two endpoints that run the model."""

import dataclasses
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from services.frontend.access.caller import Lease
from services.frontend.engine_client.messages import ABORTED, Usage
from services.frontend.errors import EngineUnavailableError, FrontendError
from services.frontend.http.answers import Answer, ChatAnswer, CompletionAnswer
from services.frontend.http.body import Bodies, Body
from services.frontend.http.body_reader import BodyReader, Reader
from services.frontend.http.echo import prompt_text
from services.frontend.http.live_requests import LiveRequests
from services.frontend.http.writer import ResponseWriter
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.pipeline import Pipeline
from services.frontend.pipeline.request import Output, Prompt
from services.frontend.pipeline.request_log import RequestRecord
from services.frontend.pipeline.samples import Samples
from services.frontend.pipeline.served_model import ServedModel
from services.telemetry.connections import address_of
from services.telemetry.tracing import TRACEPARENT, checked_traceparent


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells one of the endpoints from the other."""

    method: str
    """Its name in the log."""
    id_prefix: str
    reader: Reader
    """Reads its bodies."""
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
        bodies: Bodies,
        body_reader: BodyReader,
        *,
        slow_reader_timeout_s: float,
    ) -> None:
        self._kind = kind
        self._bodies = bodies
        self._pipeline = pipeline
        self._live = live
        self._body_reader = body_reader
        self._slow_reader_timeout_s = slow_reader_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        request_id = self._kind.id_prefix + uuid.uuid4().hex
        writer = ResponseWriter(
            send, timeout_s=self._slow_reader_timeout_s, headers={"x-request-id": request_id}
        )
        try:
            # A caller over its limits takes no place that others need, and its body is not read.
            with closing(self._begin(request_id)) as lease, self._live.place():
                request = Request(scope, receive)
                account = lease.account or address_of((scope["client"] or ("",))[0])
                with await self._bodies.read(request, account) as body:
                    work = self._serve(body, request_id, writer, request, lease)
                    await self._live.run(receive, work)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001  the edge: everything becomes a status
            await writer.fail(error)

    def _begin(self, request_id: str) -> Lease:
        """Takes the caller's place; a refusal is logged and counted as a request's.

        Raises:
            UnauthenticatedError, OverloadedError: the caller may not begin a request now.
        """
        try:
            return self._pipeline.gate.begin()
        except FrontendError:
            with self._pipeline.requests.watch(request_id, method=self._kind.method):
                raise

    async def _serve(
        self, body: Body, request_id: str, writer: ResponseWriter, request: Request, lease: Lease
    ) -> None:
        traceparent = checked_traceparent(request.headers.get(TRACEPARENT, ""))
        with self._pipeline.requests.watch(
            request_id, method=self._kind.method, traceparent=traceparent
        ) as record:
            with body:  # its bytes count until they are parsed
                call = await self._body_reader.read(
                    self._kind.reader,
                    body.content,
                    request_id,
                    max_prompt_tokens=self._pipeline.max_prompt_tokens,
                )
            model = self._pipeline.model_named(call.options.model)
            sampling = call.options.sampling
            generation = await self._pipeline.start(
                call.prompt, call.options, record=record, lease=lease
            )
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
                    text = await self._prompt_text(model, call.prompt, token_ids)
                    answer.echo(text, token_ids)
                async with aclosing(_outputs(generation, record)) as outputs:
                    if call.is_stream:
                        await _write_stream(answer, outputs, writer, with_usage=call.includes_usage)
                    else:
                        await writer.write(answer.whole(await _joined(outputs)))

    async def _prompt_text(
        self, model: ServedModel, prompt: Prompt, token_ids: Sequence[int]
    ) -> str:
        """Returns a prompt as it was given; token ids as the text that they are."""
        if isinstance(prompt, str):
            return prompt
        decoded = await self._pipeline.detokenize("", token_ids, show_special_tokens=False)
        return prompt_text(model.tokenizer, token_ids, decoded)


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
