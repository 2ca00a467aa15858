"""Authenticates callers, and follows changes of the key file."""

import asyncio
import hmac
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import structlog

from services.frontend.access.caller import Caller, Lease
from services.frontend.access.key_file import (
    MAX_KEY_CHARACTERS,
    ApiKey,
    KeyFileError,
    Limits,
    digest_of,
    read_key_file,
)
from services.frontend.errors import NotPermittedError, UnauthenticatedError
from services.settings.regular_file import describe_exposure
from services.transport.counts import Counts, LocalCounts
from services.transport.refused_calls import RefusedCalls

POLL_S = 1.0
"""Interval between checks of the file."""
_SCHEME = "bearer"

log = structlog.get_logger()


class Gate:
    """Authenticates callers by the key file; without one, allows all callers."""

    def __init__(self, key_file: Path | None = None, *, counts: Counts | None = None) -> None:
        """Reads the file.

        Raises:
            KeyFileError: the file cannot be used.
        """
        self._path = key_file
        # Callers are found under a keyed hash that outsiders cannot compute, so the search time
        # reveals nothing about a guess.
        self._secret = secrets.token_bytes(32)
        self._callers: dict[bytes, Caller] = {}
        self.counts = counts or LocalCounts()
        """Counts that limits are compared with."""
        self.refused = RefusedCalls(self.counts)
        """Calls without a known key."""
        self._anonymous = Caller("", Limits(), counts=self.counts, account="")
        self._current: ContextVar[Caller] = ContextVar("caller")
        self._stamp: tuple[int, int, int] | None = None
        if key_file is not None:
            self._stamp = _stamp(key_file)
            self._take(key_file, read_key_file(key_file))

    @property
    def requires_keys(self) -> bool:
        """Whether callers need a key."""
        return self._path is not None

    @property
    def acting_name(self) -> str | None:
        """The name of the acting key; None if there is none or keys are not needed."""
        caller = self._current.get(None)
        return None if caller is None else caller.name

    @property
    def acting_account(self) -> str:
        """The account of the acting key; empty where keys are not needed."""
        return self._current.get(self._anonymous).account

    def authenticate(self, *authorizations: str) -> Caller:
        """Returns the caller with the key in its only `authorization` header, "Bearer KEY".

        Raises:
            UnauthenticatedError: the key is missing, unknown or one of several.
        """
        if not authorizations:
            raise UnauthenticatedError("an API key is needed: authorization: Bearer KEY")
        if len(authorizations) > 1:  # a proxy may have checked another one than we would take
            raise UnauthenticatedError("there are several API keys; one is needed")
        [authorization] = authorizations
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        is_key = 0 < len(key) <= MAX_KEY_CHARACTERS and key.isascii()
        if scheme.lower() != _SCHEME or not is_key:
            raise UnauthenticatedError("authorization is not of the form: Bearer KEY")
        caller = self._callers.get(self._tag(digest_of(key)))
        if caller is None:
            raise UnauthenticatedError("the API key is not known")
        return caller

    @contextmanager
    def acting_as(self, caller: Caller) -> Iterator[None]:
        """Makes requests begun inside, and in tasks started inside, the caller's."""
        token = self._current.set(caller)
        try:
            with structlog.contextvars.bound_contextvars(caller=caller.name):
                yield
        finally:
            self._current.reset(token)

    def acting_caller(self) -> Caller:
        """Returns the acting caller.

        Raises:
            UnauthenticatedError: a key is needed, and there is none.
        """
        if not self.requires_keys:
            return self._anonymous
        caller = self._current.get(None)
        if caller is None:
            raise UnauthenticatedError("an API key is needed")
        return caller

    def begin(self, address: str = "", *, is_free: bool = False) -> Lease:
        """Takes a slot for a request of the acting caller, which comes from an address.

        A free one may be made with a token debt.

        Raises:
            UnauthenticatedError: there is no key, or it was removed.
            OverloadedError: the caller is at a limit.
        """
        return self.acting_caller().begin(address, is_free=is_free)

    def check_may_list_engines(self) -> None:
        """Raises NotPermittedError if keys are needed and the acting one may not list engines."""
        caller = self._current.get(self._anonymous)
        if self.requires_keys and not caller.limits.may_list_engines:
            raise NotPermittedError("the API key may not list engines")

    def may_use_adapter(self, name: str) -> bool:
        """Whether the acting caller may use and list an adapter."""
        return self._current.get(self._anonymous).limits.allows_adapter(name)

    def check_may_change_adapter(self, name: str) -> None:
        """Raises NotPermittedError unless the acting caller is an operator who may use an adapter.

        The error does not say whether there is one of this name.
        """
        self.check_is_operator()
        if not self.may_use_adapter(name):
            raise NotPermittedError("the API key may not use adapters of this name")

    def check_is_operator(self) -> None:
        """Raises NotPermittedError if keys are needed and the acting one is no operator's."""
        caller = self._current.get(self._anonymous)
        if self.requires_keys and not caller.limits.is_operator:
            raise NotPermittedError("the API key has no operator right")

    async def watch(self) -> None:
        """Follows the file until cancelled; an invalid file changes nothing."""
        while self._path is not None:
            await asyncio.sleep(POLL_S)
            await self.refresh(self._path)

    async def refresh(self, path: Path) -> None:
        """Reloads a changed file in a thread: thousands of keys take seconds."""
        stamp = _stamp(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(path, await asyncio.to_thread(read_key_file, path))
        except KeyFileError as error:
            log.warning("api_keys_not_reloaded", error=str(error))

    def _take(self, path: Path, keys: Sequence[ApiKey]) -> None:
        known, self._callers = self._callers, {}
        for key in keys:
            tag = self._tag(key.digest)
            caller = known.pop(tag, None) or Caller(
                key.name, key.limits, counts=self.counts, account=key.digest.hex()[:32]
            )
            caller.name, caller.limits = key.name, key.limits
            self._callers[tag] = caller
        for removed in known.values():
            removed.revoke()
        log.info("api_keys_loaded", num_keys=len(keys), num_removed=len(known))
        if exposure := describe_exposure(path):
            log.warning("secret_file_exposed", path=str(path), reason=exposure)

    def _tag(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Returns a value that changes with the file; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
