"""What the holder of one key uses, and when it is too much."""

import hashlib
from collections.abc import Callable

from services.frontend.access.key_file import Limits
from services.frontend.errors import (
    NotPermittedError,
    OverloadedError,
    UnauthenticatedError,
)
from services.telemetry.counts import Counts, Rate

PLACE_RETRY_MS = 1000
"""When to come back after too many requests at a time; they end when they end."""


class Caller:
    """Compares one key's requests and tokens with its limits.

    Tokens come out of a bucket that holds a minute's worth and fills steadily. What a request costs
    is known only as it runs, so it may overdraw the bucket; then the next one waits until the debt
    is paid. A request that runs is never cut for its rate.
    """

    def __init__(self, name: str, limits: Limits, *, counts: Counts, account: str) -> None:
        """Starts with a full bucket, unless the account has drawn from it before.

        Args:
            name: what the log and messages call it.
            limits: what it may use; may be changed later.
            counts: where its requests and tokens are counted.
            account: the name that they are counted under; the same in every frontend process.
        """
        self.name = name
        self.limits = limits
        self.account = account
        self._counts = counts
        self._live: set[Lease] = set()
        self._is_revoked = False

    def begin(self) -> "Lease":
        """Takes a place for one request.

        Raises:
            UnauthenticatedError: the key was removed.
            OverloadedError: it has too many unfinished requests, or tokens to pay back.
        """
        self.check_known()
        self.draw(0, needs=1)
        limit, place = self.limits.max_live_requests, self._place
        if not self._counts.take(place, limit=limit):
            raise OverloadedError(
                f"the key {self.name!r} has {self._counts.held(place)} unfinished requests; its"
                f" limit is {limit}",
                retry_after_ms=PLACE_RETRY_MS,
            )
        lease = Lease(self)
        self._live.add(lease)
        return lease

    def check_priority(self, priority: int) -> None:
        """Raises NotPermittedError if requests of this key may not have so high a priority."""
        limit = self.limits.max_priority
        if limit is not None and priority > limit:
            raise NotPermittedError(
                f"priority is {priority}; the key {self.name!r} allows at most {limit}"
            )

    def cache_salt(self, salt: str) -> str:
        """Returns the salt that the engine gets for a salt that the caller chose.

        With a salt key it is a keyed hash, which nobody without that key can compute or choose.
        """
        if not self.limits.salt_key:
            return salt
        return hashlib.blake2b(
            salt.encode(), key=self.limits.salt_key, person=b"octavo2.tenant", digest_size=32
        ).hexdigest()

    def engine_request_id(self, request_id: str) -> str:
        """Returns the name that the engine gets for a request: callers cannot take each other's.

        The key's name comes after a slash, which no such name contains.
        """
        return f"{request_id}/{self.name}" if self.name else request_id

    def revoke(self) -> None:
        """Ends its requests and refuses every later one: the key was removed."""
        self._is_revoked = True
        for lease in list(self._live):
            lease.stop()

    def check_known(self) -> None:
        """Raises UnauthenticatedError if the key was removed."""
        if self._is_revoked:
            raise UnauthenticatedError("the API key was removed")

    def draw(self, num_tokens: int, *, needs: int | None = None) -> None:
        """Draws tokens from the bucket, or puts them back where they are negative.

        Args:
            num_tokens: how many.
            needs: tokens that the bucket must hold, or be full; None draws always.

        Raises:
            OverloadedError: it does not hold them.
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
        """Gives a request's place back; a second time it does nothing."""
        if lease in self._live:
            self._live.discard(lease)
            self._counts.give_back(self._place)

    @property
    def _place(self) -> str:
        return f"requests/{self.account}"


class Lease:
    """One request's place, from before its prompt is read to the end of its last stream.

    It is given back once every stream that was attached is detached, or by `close` or `cancel`.
    """

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.account = caller.account
        """The name that the caller's use is counted under."""
        self._num_prompt_tokens = 0
        self._stops: list[Callable[[], None]] = []

    def charge_prompt(self, num_tokens: int) -> None:
        """Pays for the prompt.

        Raises:
            OverloadedError: the caller has not that many tokens left.
        """
        self.caller.draw(num_tokens, needs=num_tokens)
        self._num_prompt_tokens = num_tokens

    def charge_output(self, num_tokens: int) -> None:
        """Pays for output.

        Raises:
            UnauthenticatedError: the caller's key was removed; the request is to end.
        """
        self.caller.draw(num_tokens)
        self.caller.check_known()

    def attach(self, stop: Callable[[], None]) -> None:
        """Adds a stream of the request; `stop` is called when it must end early."""
        self._stops.append(stop)

    def detach(self, stop: Callable[[], None]) -> None:
        """Takes a stream that has ended away; a second time it does nothing."""
        if stop in self._stops:
            self._stops.remove(stop)
        if not self._stops:
            self.caller.leave(self)

    def stop(self) -> None:
        """Ends the request early."""
        for stop in self._stops:
            stop()

    def cancel(self) -> None:
        """Ends a request that was never run: its prompt costs nothing."""
        self.caller.draw(-self._num_prompt_tokens)
        self._num_prompt_tokens = 0
        self.close()

    def close(self) -> None:
        """Gives the place back; a second time it does nothing."""
        self.caller.leave(self)
