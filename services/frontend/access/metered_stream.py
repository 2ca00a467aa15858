"""A request's tokens, paid for as they are read."""

from typing import Protocol

from services.frontend.access.caller import Lease
from services.frontend.engine_client.messages import TokenBatch


class Tokens(Protocol):
    """What `EngineClient.submit` returns."""

    async def admitted(self) -> None:
        """Waits until the engine has taken the request."""

    async def read(self) -> TokenBatch:
        """Waits for tokens and takes all there are."""

    def abort(self) -> None:
        """Ends the request early."""


class MeteredStream:
    """Charges a stream's tokens to its caller, and ends it when the caller's key is removed."""

    def __init__(self, stream: Tokens, lease: Lease) -> None:
        """Attaches the stream to its request's lease; several may share one."""
        self._stream = stream
        self._lease = lease
        lease.attach(stream.abort)

    async def admitted(self) -> None:
        """Waits until the engine has taken the request."""
        await self._stream.admitted()

    async def read(self) -> TokenBatch:
        """Waits for tokens and takes all there are.

        Raises:
            UnauthenticatedError: the caller's key was removed meanwhile.
            FrontendError, EngineFaultError: the request failed.
        """
        try:
            batch = await self._stream.read()
            self._lease.charge_output(len(batch.token_ids))
        except BaseException:
            self.abort()
            raise
        if batch.finish_reason is not None:
            self._lease.detach(self._stream.abort)
        return batch

    def abort(self) -> None:
        """Ends the request early, unless it is over."""
        self._stream.abort()
        self._lease.detach(self._stream.abort)
