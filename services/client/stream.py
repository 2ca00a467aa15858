"""One answer as it arrives."""

from collections.abc import AsyncIterator, Callable
from typing import Self

from services.client.responses import Chunk, Completion


class Stream:
    """An answer, chunk by chunk: iterate over it, or await `completion()` for all of it.

    It ends after the chunk with a finish reason. Leaving a loop early keeps the request running
    until `cancel` is called or, used as an async context manager, the block is left.
    """

    def __init__(self, chunks: AsyncIterator[Chunk], cancel: Callable[[], None]) -> None:
        self._chunks = chunks
        self._cancel = cancel

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self._chunks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends the request on the server; harmless after the answer is complete."""
        self._cancel()

    async def completion(self) -> Completion:
        """Returns the whole answer once it is complete."""
        completion = Completion()
        async for chunk in self:
            completion.add(chunk)
        return completion
