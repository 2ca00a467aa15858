"""Connections to the services, and what it takes to be let in."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import grpc

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest message taken; the servers' own limits are lower and answer with a clear error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Certificates, as PEM files; without an authority the connection is plain text.

    Raises:
        ValueError: a file is missing, or one is given without the others that it needs.
    """

    ENV_PREFIX: ClassVar[str] = "OCTAVO_"

    tls_ca: Annotated[
        Path | None, "Speak TLS with servers that this authority's certificate (PEM) vouches for."
    ] = None
    tls_cert: Annotated[Path | None, "Our own certificate (PEM), for servers that want one."] = None
    tls_key: Annotated[Path | None, "Private key (PEM) of --tls-cert."] = None

    def __post_init__(self) -> None:
        """Checks that the files are there."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key come together")
        if self.tls_cert is not None and self.tls_ca is None:
            raise ValueError("--tls-cert needs --tls-ca")
        for path in (self.tls_ca, self.tls_cert, self.tls_key):
            if path is not None and not path.is_file():
                raise ValueError(f"there is no file {path}")

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """The credentials of the files as they are now; None for plain text."""
        if self.tls_ca is None:
            return None
        cert, key = (
            None if path is None else path.read_bytes() for path in (self.tls_cert, self.tls_key)
        )
        return grpc.ssl_channel_credentials(self.tls_ca.read_bytes(), key, cert)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Credentials that a frontend asks of its callers: certificates, an API key, both or neither.

    Raises:
        ValueError: the key's file is missing or empty, or there are two keys.
    """

    ENV_PREFIX: ClassVar[str] = "OCTAVO_"

    tls: Tls = Tls()
    api_key_file: Annotated[Path | None, "File that holds our API key and nothing else."] = None
    api_key: str | None = field(default=None, repr=False)
    """The key itself; no flag, because other users of a machine can read command lines."""

    def __post_init__(self) -> None:
        """Reads the key's file."""
        if self.api_key_file is None:
            return
        if self.api_key is not None:
            raise ValueError("api_key and api_key_file are two keys")
        try:
            key = self.api_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the key in {self.api_key_file} cannot be read: {error}") from None
        if not (key and key.isascii() and key.isprintable()):
            raise ValueError(f"{self.api_key_file} holds no API key")
        object.__setattr__(self, "api_key", key)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)


PLAIN = Tls()
OPEN = Access()


def open_channel(address: str, tls: Tls = PLAIN) -> grpc.aio.Channel:
    """Returns a channel to `address` (host:port); it connects when first used.

    It uses a proxy that the environment names, as gRPC does, but not for this machine.
    """
    options, credentials = _options(address), tls.credentials
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def open_blocking_channel(address: str, tls: Tls = PLAIN) -> grpc.Channel:
    """Returns a channel like that of `open_channel`, for calls without an event loop."""
    options, credentials = _options(address), tls.credentials
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def _options(address: str) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A vanished host is found by pings within seconds; TCP alone takes minutes.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        # Come back to a restarted server within a second, not within two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_http_proxy", int(not _is_loopback(address))),
    ]


def _is_loopback(address: str) -> bool:
    """Whether host:port is on this machine."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
