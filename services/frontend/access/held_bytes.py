"""Counts bytes that are held for callers, in all and per account."""

from collections.abc import Iterator
from contextlib import contextmanager

from services.frontend.errors import OverloadedError
from services.transport.counts import Counts

RETRY_MS = 1000


class HeldBytes:
    """Bytes of one kind. An account is an API key or, without keys, a client address."""

    def __init__(
        self, counts: Counts, name: str, what: str, *, limit: int, limit_per_account: int
    ) -> None:
        """Starts with what is held.

        Args:
            counts: where bytes are counted, as `name` and, for each account, `name/account`.
            name: the count's.
            what: the things that have the bytes, in the plural, for refusals.
            limit: most bytes held at a time.
            limit_per_account: the same for one account.
        """
        self._counts = counts
        self._name = name
        self._what = what
        self._limit = limit
        self._limit_per_account = limit_per_account

    def take(self, account: str, num_bytes: int) -> None:
        """Counts more bytes.

        Raises:
            OverloadedError: that takes them over a limit.
        """
        own = f"{self._name}/{account}"
        if not self._counts.take(own, num_bytes, limit=self._limit_per_account):
            raise self._refusal(f"your {self._what}", own, self._limit_per_account)
        if not self._counts.take(self._name, num_bytes, limit=self._limit):
            self._counts.give_back(own, num_bytes)
            raise self._refusal(self._what, self._name, self._limit)

    def give_back(self, account: str, num_bytes: int) -> None:
        """Uncounts bytes."""
        self._counts.give_back(self._name, num_bytes)
        self._counts.give_back(f"{self._name}/{account}", num_bytes)

    @contextmanager
    def holding(self, account: str, num_bytes: int) -> Iterator[None]:
        """Counts bytes meanwhile; see `take`."""
        self.take(account, num_bytes)
        try:
            yield
        finally:
            self.give_back(account, num_bytes)

    def _refusal(self, what: str, name: str, limit: int) -> OverloadedError:
        return OverloadedError(
            f"{what} have {self._counts.held(name)} bytes; the limit is {limit}",
            retry_after_ms=RETRY_MS,
        )
