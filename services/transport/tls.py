"""Certificates of both ends of a connection, read again when their files change.

A server looks at its files at every handshake: new ones count from the next connection on, and
connections that are open go on. Files that do not fit together, as in the moment between two
copies, are left until they do, and the last good ones stay in use. A client reads its files each
time it opens a channel.
"""

import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import grpc
import structlog

from services.settings.regular_file import describe_exposure, read_regular_file
from services.transport.grpc_options import Options

MAX_FILE_BYTES = 4 * 2**20
"""Largest file of certificates; all authorities of an operating system take 0.2 MB."""

log = structlog.get_logger()


class TlsFilesError(ValueError):
    """Certificate files are missing, cannot be read or do not fit together."""


class ServerTls:
    """A server's certificate and key, and whose clients' certificates it wants to see."""

    def __init__(self, *, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Reads the files, which are PEM.

        Args:
            cert: the server's certificate, followed by the chain to its authority.
            key: its private key, without a passphrase.
            client_ca: authorities of clients; with it, a client without their certificate is
                refused in the handshake.

        Raises:
            TlsFilesError: a file cannot be used.
        """
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        self._tried = self._stamps()
        self._loaded = self._load(self._tried)

    @classmethod
    def from_settings(
        cls, *, cert: Path | None, key: Path | None, client_ca: Path | None
    ) -> Self | None:
        """Returns what the flags ask for; None without any of them.

        Raises:
            TlsFilesError: a flag lacks the others, or a file cannot be used.
        """
        if cert is None and key is None and client_ca is None:
            return None
        if cert is None or key is None:
            raise TlsFilesError("TLS needs both --tls-cert and --tls-key")
        return cls(cert=cert, key=key, client_ca=client_ca)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Returns credentials for gRPC that follow the files."""
        given = self._loaded

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            loaded = self._refreshed()
            if loaded is given:
                return None
            given = loaded
            return loaded.grpc_configuration

        return grpc.dynamic_ssl_server_credentials(
            given.grpc_configuration, fetch, require_client_authentication=bool(self._client_ca)
        )

    def ssl_context(self) -> ssl.SSLContext:
        """Returns a context for asyncio's servers that follows the files."""
        context = _FollowingContext(ssl.PROTOCOL_TLS_SERVER)
        context.server_tls = self
        return context

    def current_context(self) -> ssl.SSLContext:
        """Returns the context of the files as they are now, or as they last made sense."""
        return self._refreshed().context

    def _refreshed(self) -> "_Loaded":
        with self._lock:
            try:
                stamps = self._stamps()
                if stamps == self._tried:
                    return self._loaded
                self._tried = stamps
                self._loaded = self._load(stamps)
            except TlsFilesError as error:
                log.warning("certificates_not_reloaded", error=str(error))
            else:
                log.info("certificates_reloaded", cert=str(self._cert))
            return self._loaded

    def _load(self, stamps: "_Stamps") -> "_Loaded":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _load_pair(context, self._cert, self._key)
        roots = None
        if self._client_ca is not None:
            _load_authorities(context, self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            roots = _read(self._client_ca)
        pair = (_read(self._key), _read(self._cert))
        if self._stamps() != stamps:
            raise TlsFilesError("the files change while they are read")
        _warn_of_exposure(self._key)
        configuration = grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)
        return _Loaded(context, configuration)

    def _stamps(self) -> "_Stamps":
        paths = (self._cert, self._key, self._client_ca)
        return tuple(_stamp(path) for path in paths if path is not None)


class ClientTls:
    """Whose servers a client trusts, and the certificate that it shows where one is wanted."""

    def __init__(self, *, ca: Path, cert: Path | None, key: Path | None) -> None:
        """Reads the files once, to see that they can be used.

        Args:
            ca: authorities of servers, as PEM.
            cert: the client's own certificate; None shows none.
            key: its private key.

        Raises:
            TlsFilesError: a file cannot be used.
        """
        self._ca, self._cert, self._key = ca, cert, key
        self.credentials()
        if key is not None:
            _warn_of_exposure(key)

    @classmethod
    def from_settings(
        cls, *, ca: Path | None, cert: Path | None, key: Path | None, prefix: str
    ) -> Self | None:
        """Returns what the flags that begin with `prefix` ask for; None without any of them.

        Raises:
            TlsFilesError: a flag lacks the others, or a file cannot be used.
        """
        if ca is None and cert is None and key is None:
            return None
        if ca is None:
            raise TlsFilesError(f"TLS needs {prefix}-ca")
        if (cert is None) != (key is None):
            raise TlsFilesError(f"{prefix}-cert and {prefix}-key come together")
        return cls(ca=ca, cert=cert, key=key)

    def credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of the files as they are now.

        Raises:
            TlsFilesError: a file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, self._ca)
        chain = key = None
        if self._cert is not None and self._key is not None:
            _load_pair(context, self._cert, self._key)
            chain, key = _read(self._cert), _read(self._key)
        return grpc.ssl_channel_credentials(_read(self._ca), key, chain)


def open_channel(address: str, options: Options, tls: ClientTls | None) -> grpc.aio.Channel:
    """Returns a channel to `address`, in plain text where `tls` is None.

    It never uses a proxy that the environment names.

    Raises:
        TlsFilesError: a certificate file cannot be used now.
    """
    # gRPC follows http_proxy and its like even to loopback, and without TLS.
    options = [*options, ("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


_Stamps = Sequence[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One reading of a server's files, for both kinds of server."""

    context: ssl.SSLContext
    grpc_configuration: grpc.ServerCertificateConfiguration


class _FollowingContext(ssl.SSLContext):
    """Begins each handshake with the context that counts at that time.

    Loading new files into a context that is in use would do for certificates, but an authority
    once trusted could never be taken back.
    """

    server_tls: ServerTls

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Returns the TLS end of one connection."""
        return self.server_tls.current_context().wrap_bio(*args, **kwargs)


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise TlsFilesError(f"{path} cannot be read: {error.strerror}") from None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> bytes:
    try:
        return read_regular_file(path, max_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise TlsFilesError(f"{path} cannot be read: {error.strerror}") from None


def _warn_of_exposure(key: Path) -> None:
    if exposure := describe_exposure(key):
        log.warning("secret_file_exposed", path=str(key), reason=exposure)


def _load_pair(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    _read(cert), _read(key)  # OpenSSL does not say which of the two it could not open
    try:
        context.load_cert_chain(cert, key, password=_refuse_passphrase)
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise TlsFilesError(f"{cert} and {key} cannot be used: {reason}") from None


def _load_authorities(context: ssl.SSLContext, ca: Path) -> None:
    _read(ca)
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise TlsFilesError(f"{ca} holds no certificates: {reason}") from None


def _refuse_passphrase() -> NoReturn:
    raise TlsFilesError("the private key has a passphrase; a service cannot be asked for it")
