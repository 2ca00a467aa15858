"""Methods of services that need their call's message alone."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

from google.protobuf.message import Message

ServicerT = TypeVar("ServicerT")
RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT")
Method = Callable[[ServicerT, RequestT], Awaitable[ResponseT]]


def checked(
    check: Callable[[Any, Message], None],
) -> Callable[[Method[ServicerT, RequestT, ResponseT]], Callable[..., Awaitable[ResponseT]]]:
    """Returns a decorator that makes a method of a service out of one without the call's context.

    check: takes the servicer and the message, which it may refuse, before the method does.
    """

    def decorate(
        method: Method[ServicerT, RequestT, ResponseT],
    ) -> Callable[..., Awaitable[ResponseT]]:
        @wraps(method)
        async def call(servicer: ServicerT, request: RequestT, context: object) -> ResponseT:
            check(servicer, request)
            return await method(servicer, request)

        return call

    return decorate
