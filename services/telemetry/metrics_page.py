"""Renders the figures for all that ask at a time, and spends a bounded share of time on it."""

import asyncio

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

PAUSE = 9
"""After a page nothing is rendered for this many times as long as it took: a tenth of a core."""


class MetricsPage:
    """Renders pages in a thread, one at a time; calls that wait share the next one.

    Rendering holds Python's lock, so a flood of scrapes would slow down all that the process does.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Renders `registry`, in one event loop."""
        self._registry = registry
        self._rendering = asyncio.Lock()
        self._not_before_s = 0.0
        self._next: dict[str, asyncio.Task[bytes]] = {}

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the figures, none older than the call, and their content type.

        Args:
            accept: the header of this name, which chooses the form.

        Raises:
            TimeoutError: the service's event loop does not get round to it.
        """
        _, content_type = choose_encoder(accept)
        page = self._next.get(content_type)
        if page is None:
            page = asyncio.create_task(self._render(accept, content_type))
            page.add_done_callback(_note_failure)
            self._next[content_type] = page
        return await asyncio.shield(page), content_type

    async def _render(self, accept: str, content_type: str) -> bytes:
        loop = asyncio.get_running_loop()
        encode, _ = choose_encoder(accept)
        async with self._rendering:
            await asyncio.sleep(max(0.0, self._not_before_s - loop.time()))
            del self._next[
                content_type
            ]  # figures are read from here on: later calls want later ones
            start_s = loop.time()
            try:
                return await asyncio.to_thread(encode, self._registry)
            finally:
                self._not_before_s = loop.time() + PAUSE * (loop.time() - start_s)


def _note_failure(page: asyncio.Task[bytes]) -> None:
    """Marks a failure as seen, for the case that every caller is gone."""
    if not page.cancelled():
        page.exception()
