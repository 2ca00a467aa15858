"""The async Python client of the frontend."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import grpc

from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.client.channel import OPEN, Access, open_channel
from services.client.errors import CancelledError, InternalError, error_of_call
from services.client.requests import (
    Message,
    Options,
    Reply,
    Tool,
    chat_request,
    generate_request,
)
from services.client.responses import Chunk, ModelCard, Token, chunk_of, model_card_of
from services.client.session import Session
from services.client.stream import Stream
from services.client.tracing import call_metadata
from services.client.vectors import (
    Scores,
    VectorOptions,
    Vectors,
    embed_request,
    scores_of,
    vectors_of,
)

DEFAULT_ADDRESS = "127.0.0.1:50050"


class OctavoClient:
    """Talks to a frontend.

        async with OctavoClient("127.0.0.1:50050") as client:
            async for chunk in client.chat([Message(role="user", content="Hello")]):
                print(chunk.text, end="", flush=True)

    Every method raises a subclass of `services.client.errors.OctavoError`; a stream raises it while
    it is iterated. `timeout_s` is the request's time limit, which the servers keep too.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, access: Access = OPEN) -> None:
        self._channel = open_channel(address, access.tls)
        self._metadata = access.metadata
        self._stub = frontend_pb2_grpc.FrontendServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection and ends what still runs on it."""
        await self._channel.close()

    def generate(
        self,
        prompt: str | Sequence[int],
        options: Options | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Stream:
        """Continues a prompt, given as text or as token ids."""
        request = generate_request(prompt, options or Options())
        return self._stream(self._stub.Generate, request, timeout_s)

    def chat(
        self,
        messages: Sequence[Message],
        options: Options | None = None,
        *,
        tools: Sequence[Tool] = (),
        reply: Reply | None = None,
        timeout_s: float | None = None,
    ) -> Stream:
        """Answers a conversation through the model's chat template.

        Args:
            messages: the conversation, oldest first.
            options: sampling and limits.
            tools: tools that the model may call.
            reply: rules for calls and reasoning, and variables of the template.
            timeout_s: time limit of the request.
        """
        request = chat_request(messages, options or Options(), tools, reply)
        return self._stream(self._stub.Chat, request, timeout_s)

    def session(self) -> Session:
        """Returns a session, to be entered with `async with`: many requests over one stream."""
        return Session(self._stub, metadata=self._metadata)

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        options: VectorOptions | None = None,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        timeout_s: float | None = None,
    ) -> Vectors:
        """Returns the vectors of up to 2048 texts and lists of token ids.

        Args:
            inputs: texts, or token ids, which are used as they are.
            options: the model and limits.
            dimensions: leading elements of each vector; None for all.
            prompt_name: the model's prompt to put before texts; None for its default one.
            timeout_s: time limit of the request.
        """
        request = embed_request(
            inputs, options or VectorOptions(), dimensions=dimensions, prompt_name=prompt_name
        )
        return vectors_of(await self._answer(self._stub.Embed, request, timeout_s))

    async def score(
        self,
        queries: str | Sequence[str],
        documents: Sequence[str],
        options: VectorOptions | None = None,
        *,
        instruction: str | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """Returns how well each document answers its query.

        Args:
            queries: one for all documents, or as many as documents.
            documents: up to 2048 texts.
            options: the model and limits.
            instruction: the criterion, of models that take one; None for the model's own.
            timeout_s: time limit of the request.
        """
        request = frontend_pb2.ScoreRequest(
            options=(options or VectorOptions()).to_proto(),
            queries=[queries] if isinstance(queries, str) else queries,
            documents=documents,
            instruction=instruction,
        )
        return scores_of(await self._answer(self._stub.Score, request, timeout_s))

    async def tokenize(
        self,
        text: str | Sequence[Message],
        *,
        model: str = "",
        parse_special_tokens: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[Token]:
        """Turns text, or a conversation through the chat template, into tokens."""
        request = frontend_pb2.TokenizeRequest(
            model=model, parse_special_tokens=parse_special_tokens
        )
        if isinstance(text, str):
            request.text = text
        else:
            request.conversation.messages.extend(message.to_proto() for message in text)
        response = await self._answer(self._stub.Tokenize, request, timeout_s)
        return [
            Token(id=token_id, text=token)
            for token_id, token in zip(response.token_ids, response.tokens, strict=True)
        ]

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        show_special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """Turns token ids into text."""
        request = frontend_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, show_special_tokens=show_special_tokens
        )
        response = await self._answer(self._stub.Detokenize, request, timeout_s)
        return str(response.text)

    async def explain_request(
        self, request_id: str, *, timeout_s: float | None = None
    ) -> frontend_pb2.ExplainRequestResponse:
        """Returns where the time of a live or a recent request went."""
        request = frontend_pb2.ExplainRequestRequest(request_id=request_id)
        response: frontend_pb2.ExplainRequestResponse = await self._answer(
            self._stub.ExplainRequest, request, timeout_s
        )
        return response

    async def list_models(self, *, timeout_s: float | None = None) -> list[ModelCard]:
        """Returns the models that requests may name."""
        request = frontend_pb2.ListModelsRequest()
        response = await self._answer(self._stub.ListModels, request, timeout_s)
        return [model_card_of(card) for card in response.models]

    def _stream(self, method: Any, request: Any, timeout_s: float | None) -> Stream:
        call = self._call(method, request, timeout_s)
        return Stream(_chunks(call), call.cancel)

    async def _answer(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        try:
            return await self._call(method, request, timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from None

    def _call(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        return method(request, timeout=timeout_s, metadata=self._metadata + call_metadata())


async def _chunks(call: Any) -> AsyncIterator[Chunk]:
    """Reads a call to its end, which must be a finish reason or an error."""
    is_complete = False
    try:
        async for response in call:
            chunk = chunk_of(response.output)
            is_complete = chunk.usage is not None
            yield chunk
    except grpc.aio.AioRpcError as error:
        raise error_of_call(error) from None
    except asyncio.CancelledError:
        if _is_task_cancelled():
            raise
        # grpc.aio reports Stream.cancel() as if the reading task itself had been cancelled.
        raise CancelledError("the request was cancelled", code="CANCELLED") from None
    if not is_complete:
        raise InternalError("the stream ended without a finish reason", code="UNKNOWN")


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
