"""The scheduler's records of the worker's table of encoded images."""

from collections import OrderedDict
from dataclasses import dataclass

from services.engine.config.images import pages_of


@dataclass(slots=True)
class _Entry:
    pages: list[int]
    num_users: int = 0
    was_read: bool = False


class EncoderCache:
    """Gives images pages of the table, and finds images that were encoded before.

    Steps run in their order, so an image counts as encoded once a step that encodes it is sent, and
    its pages may be given away once the last step that reads them is.
    """

    def __init__(self, num_pages: int) -> None:
        """Starts with all pages free."""
        self._free = list(range(num_pages - 1, -1, -1))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._num_unused = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, digest: bytes) -> list[int] | None:
        """Returns the pages of an image that is encoded, and keeps it for a user; None without."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self._entries.move_to_end(digest)
        if not entry.num_users:
            self._num_unused -= len(entry.pages)
        entry.num_users += 1
        return entry.pages

    def has_other_readers(self, digest: bytes) -> bool:
        """Whether an image that was just found has been read, or has another user."""
        entry = self._entries[digest]
        return entry.was_read or entry.num_users > 1

    def note_read(self, digest: bytes) -> None:
        """Notes that a step reads an image that is kept."""
        self._entries[digest].was_read = True

    def take(self, digest: bytes, num_vectors: int) -> list[int] | None:
        """Gives an image that is not encoded pages, for one user; None where too few are free.

        Images without users make room, those used longest ago first.
        """
        num_pages = pages_of(num_vectors)
        if num_pages > len(self._free) + self._num_unused:
            return None
        for old in [each for each, entry in self._entries.items() if not entry.num_users]:
            if num_pages <= len(self._free):
                break
            entry = self._entries.pop(old)
            self._num_unused -= len(entry.pages)
            self._free += entry.pages
        pages = [self._free.pop() for _ in range(num_pages)]
        self._entries[digest] = _Entry(pages, num_users=1)
        return pages

    def holds(self, digest: bytes, pages: list[int]) -> bool:
        """Whether an image has these pages."""
        entry = self._entries.get(digest)
        return entry is not None and entry.pages is pages

    def release(self, digest: bytes) -> None:
        """Ends one use of an image, which stays until its pages are needed."""
        entry = self._entries.get(digest)
        if entry is None:
            return  # forgotten meanwhile
        entry.num_users -= 1
        if not entry.num_users:
            self._num_unused += len(entry.pages)

    def forget(self) -> None:
        """Forgets all images; no one may use any."""
        for entry in self._entries.values():
            self._free += entry.pages
        self._entries.clear()
        self._num_unused = 0
