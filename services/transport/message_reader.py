"""Parses protobuf messages on the event loop, in bounded steps."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from services.transport.message_limits import (
    MalformedMessageError,
    MessageLimits,
    MessageTooLargeError,
    check_message,
)

INLINE_MESSAGE_BYTES = 4096
"""Messages of more bytes are measured before they are parsed."""
INLINE_LIMITS = MessageLimits(max_fields=1024, max_text_bytes=2**18, max_packed_bytes=2**18)
"""Messages that hold more take turns."""

Deserialize = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """A message of a stream that is over a limit, in the place of the message."""

    data: bytes
    error: MessageTooLargeError


class MessageReader:
    """Parses what callers send.

    A message that holds much waits for its turn and lets others run between its steps, so that
    many of them at a time hold the event loop no longer than one.
    """

    def __init__(self, limits: MessageLimits | None = None) -> None:
        """Refuses messages that hold more than `limits`; None sets the default ones."""
        self._limits = limits or MessageLimits()
        self._turn = asyncio.Lock()

    async def read(self, deserialize: Deserialize | None, data: bytes) -> Any:
        """Returns a message; without a deserializer the bytes are the message.

        Raises:
            MalformedMessageError: they are no such message, or hold more than the limits allow.
        """
        if deserialize is None:
            return data
        if len(data) <= INLINE_MESSAGE_BYTES:
            return _parse(deserialize, data)
        message_class = _class_of(deserialize)
        with suppress(MessageTooLargeError):
            check_message(data, message_class, INLINE_LIMITS)
            return _parse(deserialize, data)
        async with self._turn:
            await asyncio.sleep(0)
            check_message(data, message_class, self._limits)
            await asyncio.sleep(0)
            message = _parse(deserialize, data)
            await asyncio.sleep(0)
        return message

    async def messages(
        self, deserialize: Deserialize | None, receive: Callable[[], Awaitable[Any]]
    ) -> AsyncIterator[Any]:
        """Goes through a stream's messages; one that is over a limit comes as RefusedMessage.

        It keeps no message while it waits for the next one, as gRPC's own iterator does.

        Args:
            deserialize: makes a message of bytes.
            receive: waits for the bytes of the next message; returns EOF at the end.

        Raises:
            MalformedMessageError: the bytes are no such message.
        """
        while (data := await receive()) is not grpc.aio.EOF:
            try:
                read = [await self.read(deserialize, data)]
            except MessageTooLargeError as error:
                read = [RefusedMessage(data, error)]
            del data
            yield read.pop()


def _parse(deserialize: Deserialize, data: bytes) -> Any:
    try:
        return deserialize(data)
    except DecodeError:
        raise MalformedMessageError("the message cannot be parsed") from None


def _class_of(deserialize: Deserialize) -> type[Message]:
    """Returns the class whose `FromString` this is, as generated code registers it."""
    message_class = getattr(deserialize, "__self__", None)
    assert isinstance(message_class, type), "methods are registered with FromString"
    assert issubclass(message_class, Message), "methods are registered with FromString"
    return message_class
