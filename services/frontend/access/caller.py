"""The usage and limits of one API key."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Self

from services.frontend.access.held_bytes import HeldBytes
from services.frontend.access.key_file import Limits
from services.frontend.errors import (
    InvalidRequestError,
    NotPermittedError,
    OverloadedError,
    UnauthenticatedError,
)
from services.transport.counts import Counts, Rate

REFUSED_BYTES_PER_TOKEN = 4
"""Bytes of a refused request that cost one token, about the bytes of a token of English text."""
PLACE_RETRY_MS = 1000
"""Suggested wait after too many concurrent requests."""


class Caller:
    """Checks one key's requests and tokens against its limits.

    A bucket holds one minute's tokens and fills steadily. A running request may overdraw it and is
    never cut; the next request waits until the debt is paid.
    """

    def __init__(self, name: str, limits: Limits, *, counts: Counts, account: str) -> None:
        """Starts with a full bucket, or with the account's current one."""
        self.name = name
        self.limits = limits
        self.account = account
        self._counts = counts
        self._live: set[Lease] = set()
        self._is_revoked = False

    def begin(self, address: str = "", *, is_free: bool = False) -> "Lease":
        """Takes a slot for one request, which comes from an address.

        A free one may be made with a token debt.

        Raises:
            UnauthenticatedError: the key was removed.
            OverloadedError: it has too many unfinished requests, or a token debt.
        """
        self.check_known()
        self.draw(0, needs=None if is_free else 1)
        limit, place = self.limits.max_live_requests, self._place
        if not self._counts.take(place, limit=limit):
            raise OverloadedError(
                f"the key {self.name!r} has {self._counts.held(place)} unfinished requests; its"
                f" limit is {limit}",
                retry_after_ms=PLACE_RETRY_MS,
            )
        lease = Lease(self, self.account or address, is_free=is_free)
        self._live.add(lease)
        return lease

    def check_priority(self, priority: int) -> None:
        """Raises NotPermittedError if the priority is over the key's limit."""
        limit = self.limits.max_priority
        if limit is not None and priority > limit:
            raise NotPermittedError(
                f"priority is {priority}; the key {self.name!r} allows at most {limit}"
            )

    def cache_salt(self, salt: str) -> str:
        """Returns the engine's cache salt; with a salt key, a hash that others cannot compute."""
        if not self.limits.salt_key:
            return salt
        return hashlib.blake2b(
            salt.encode(), key=self.limits.salt_key, person=b"octavo2.tenant", digest_size=32
        ).hexdigest()

    def engine_request_id(self, request_id: str) -> str:
        """Returns the request id for the engine, unique to the key.

        The key's name follows a slash; names contain none.
        """
        return f"{request_id}/{self.name}" if self.name else request_id

    def revoke(self) -> None:
        """Ends its requests and refuses later ones, after the key was removed."""
        self._is_revoked = True
        for lease in list(self._live):
            lease.stop()

    def check_known(self) -> None:
        """Raises UnauthenticatedError if the key was removed."""
        if self._is_revoked:
            raise UnauthenticatedError("the API key was removed")

    def draw(self, num_tokens: int, *, needs: int | None = None) -> None:
        """Draws tokens from the bucket; a negative number returns them.

        Raises:
            OverloadedError: the bucket has fewer than `needs` tokens and is not full.
        """
        rate = self.limits.tokens_per_minute
        if rate is None:
            return
        missing = self._counts.draw(
            f"tokens/{self.account}",
            num_tokens,
            rate=Rate(per_s=rate / 60, capacity=rate),
            needs=None if needs is None else min(needs, rate),
        )
        if missing:
            raise OverloadedError(
                f"the key {self.name!r} has used its {rate} tokens per minute",
                retry_after_ms=int(missing / rate * 60_000) + 1,
            )

    def leave(self, lease: "Lease") -> None:
        """Releases a request's slot once."""
        if lease in self._live:
            self._live.discard(lease)
            lease.give_back()
            self._counts.give_back(self._place)

    @property
    def _place(self) -> str:
        return f"requests/{self.account}"


class Lease:
    """One request's slot, until all its streams are detached, `close` or `cancel`.

    As a context manager it closes at the end, and charges a request that is refused as invalid.
    """

    def __init__(self, caller: Caller, account: str, *, is_free: bool = False) -> None:
        self.caller = caller
        self._is_free = is_free
        self.account = account
        """The name under which usage is counted: the key's or, without keys, the address."""
        self.num_bytes = 0
        """Bytes received of the request so far."""
        self._num_prompt_tokens = 0
        self._stops: list[Callable[[], None]] = []
        self._holds: list[Callable[[], None]] = []

    @property
    def opaque_account(self) -> str:
        """A name for the account, from which no key or address can be found."""
        return hashlib.blake2b(
            self.account.encode(), person=b"octavo.caller", digest_size=16
        ).hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        del kind, at
        if isinstance(error, InvalidRequestError):
            self.charge_refusal()
        self.close()

    def charge_refusal(self) -> None:
        """Charges the bytes of a request that is refused or never completed."""
        self.caller.draw(self.num_bytes // REFUSED_BYTES_PER_TOKEN)

    def check_prompt(self, num_tokens: int) -> None:
        """Checks that `num_tokens` could be charged, before a prompt of at least these is encoded.

        Raises:
            OverloadedError: the caller has too few tokens left.
        """
        if not self._is_free:
            self.caller.draw(0, needs=num_tokens)

    def charge_prompt(self, num_tokens: int) -> None:
        """Charges the prompt.

        Raises:
            OverloadedError: the caller has too few tokens left.
            UnauthenticatedError: the key was removed.
        """
        self.caller.check_known()
        self.caller.draw(num_tokens, needs=num_tokens)
        self._num_prompt_tokens = num_tokens

    def charge_output(self, num_tokens: int) -> None:
        """Charges output.

        Raises:
            UnauthenticatedError: the key was removed; the request must end.
        """
        self.caller.draw(num_tokens)
        self.caller.check_known()

    def hold(self, held: HeldBytes, num_bytes: int) -> None:
        """Counts bytes until the slot is released.

        Raises:
            OverloadedError: that takes them over a limit.
        """
        held.take(self.account, num_bytes)
        self._holds.append(partial(held.give_back, self.account, num_bytes))

    @contextmanager
    def holding_meanwhile(self) -> Iterator[None]:
        """Uncounts at its end what `hold` counts meanwhile."""
        num_holds = len(self._holds)
        try:
            yield
        finally:
            self._give_back_to(num_holds)

    def give_back(self) -> None:
        """Uncounts the bytes of `hold`."""
        self._give_back_to(0)

    def _give_back_to(self, num_holds: int) -> None:
        while len(self._holds) > num_holds:
            self._holds.pop()()

    def attach(self, stop: Callable[[], None]) -> None:
        """Attaches a stream; `stop` must end it early."""
        self._stops.append(stop)

    def detach(self, stop: Callable[[], None]) -> None:
        """Detaches an ended stream, if attached."""
        if stop in self._stops:
            self._stops.remove(stop)
        if not self._stops:
            self.caller.leave(self)

    def stop(self) -> None:
        """Ends the request early."""
        for stop in self._stops:
            stop()

    def cancel(self) -> None:
        """Ends a request that never ran, and refunds its prompt."""
        self.caller.draw(-self._num_prompt_tokens)
        self._num_prompt_tokens = 0
        self.close()

    def close(self) -> None:
        """Releases the slot once."""
        self.caller.leave(self)
