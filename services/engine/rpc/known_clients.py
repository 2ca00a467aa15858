"""Restricts calls to client certificates of certain names."""

import ssl
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from services.engine.errors import NotPermittedError
from services.transport.call_scope import scoped
from services.transport.refused_calls import RefusedCalls

_OPEN_PREFIX = "/grpc.health.v1.Health/"
"""Probes may show any certificate of the authority."""


class KnownClients(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """Refuses callers whose certificate has none of the allowed names.

    The TLS handshake has verified the certificate. `ErrorInterceptor` comes before this interceptor
    and turns its error into a status.
    """

    def __init__(self, names: Collection[str], refused: RefusedCalls) -> None:
        self._names = frozenset(names)
        self._refused = refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_PREFIX):
            return handler
        method = handler_call_details.method
        return scoped(handler, lambda context: self._checked(context, method))

    @contextmanager
    def _checked(self, context: grpc.aio.ServicerContext, method: str) -> Iterator[None]:
        names = _names_of(context)
        if self._names.isdisjoint(names):
            self._refused.note(method=method, peer=context.peer())
            raise NotPermittedError(
                f"the certificate's names {sorted(names)} are not among --tls-allowed-clients"
            )
        yield


def _names_of(context: grpc.aio.ServicerContext) -> set[str]:
    """Returns a caller's subject alternative names, or else its common name."""
    facts = context.auth_context()
    values = facts.get("x509_subject_alternative_name") or facts.get("x509_common_name") or ()
    return {value.decode(errors="replace") for value in values if not _is_cut(value, facts)}


def _is_cut(name: bytes, facts: Mapping[str, Sequence[bytes]]) -> bool:
    """Returns whether a name has a NUL, where gRPC cuts what it hands to Python."""
    # Alternative names are ASCII in the certificate. A common name may be UTF-16 there, but the
    # subject as text has its NUL as an escape.
    der = ssl.PEM_cert_to_DER_cert(facts["x509_pem_cert"][0].decode())
    subjects = facts.get("x509_subject", ())  # a certificate may have none
    return name + b"\0" in der or any(b"\\00" in subject for subject in subjects)
