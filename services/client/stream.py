"""One answer as it arrives."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Self

from services.client.responses import Chunk, Completion


class Stream:
    """An answer, chunk by chunk: iterate over it, or await `completion()` for all of it.

    It ends after the chunk with the usage. Leaving a loop early keeps the request running
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
        """Returns the whole answer once it is complete; the first one where `n` asked for more."""
        return (await self.completions())[0]

    async def completions(self) -> list[Completion]:
        """Returns all answers once they are complete; the usage of each is that of all."""
        answers: defaultdict[int, Completion] = defaultdict(Completion)
        async for chunk in self:
            answers[chunk.index].add(chunk)
            if chunk.usage is not None:
                for answer in answers.values():
                    answer.usage = chunk.usage
        return [answer for _, answer in sorted(answers.items())]
