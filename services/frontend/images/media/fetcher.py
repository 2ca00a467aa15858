"""Fetches images from the hosts that the operator names, and from no private network."""

import asyncio
import socket
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from urllib.parse import urljoin

import structlog

from services.frontend.errors import InvalidRequestError
from services.frontend.images.media.addresses import is_public
from services.frontend.images.media.response import Response, ResponseError
from services.frontend.images.media.urls import MediaHost, MediaUrl, parse_media_url

MAX_REDIRECTS = 3
MAX_ADDRESSES = 3
"""Addresses of a host that are tried."""
MAX_FETCHES = 16
"""Images that are fetched at a time; others wait within their time limit."""
TIMEOUT_S = 10.0
"""Time limit of an image, from the wait to its last byte."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host name and port; raises OSError."""
Connect = Callable[[str, int, str], Awaitable[tuple[StreamReader, StreamWriter]]]
"""Connects to an address and port with TLS for a host name; raises OSError."""

log = structlog.get_logger()


async def resolve_host(name: str, port: int) -> Sequence[str]:
    """Returns a host's addresses, as the system resolves them."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class TlsConnector:
    """Connects with TLS and the system's certificate authorities."""

    def __init__(self) -> None:
        self._context = ssl.create_default_context()

    async def __call__(
        self, address: str, port: int, name: str
    ) -> tuple[StreamReader, StreamWriter]:
        """Connects; the server must have a certificate for the name."""
        return await asyncio.open_connection(address, port, ssl=self._context, server_hostname=name)


class MediaFetcher:
    """Fetches images over https.

    A host must be one that the operator named, and so must every host that it redirects to. Its
    name is resolved once and the connection goes to the addresses found, of which every one must be
    public: a name that resolves to a private address later, or to both, reaches nothing.
    """

    def __init__(
        self,
        hosts: Iterable[MediaHost],
        *,
        max_bytes: int,
        timeout_s: float = TIMEOUT_S,
        resolve: Resolve = resolve_host,
        connect: Connect | None = None,
    ) -> None:
        """Takes the hosts; none means that every URL is refused.

        Args:
            hosts: where images may be fetched from.
            max_bytes: most bytes of an image.
            timeout_s: time limit of an image.
            resolve: finds addresses.
            connect: opens connections; `TlsConnector` by default.
        """
        self._hosts = frozenset(hosts)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._connect = connect or TlsConnector()
        self._turns = asyncio.Semaphore(MAX_FETCHES)

    async def fetch(self, url: str) -> bytes:
        """Returns the bytes at an https URL.

        Raises:
            InvalidRequestError: the URL may not be fetched, or could not be.
        """
        found = parse_media_url(url, self._hosts)
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                return await self._follow(url, found)
        except TimeoutError:
            raise _failure(found.host, f"it took over {self._timeout_s:g} s") from None
        except ResponseError as error:
            raise _failure(found.host, str(error)) from None

    async def _follow(self, url: str, found: MediaUrl) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            response = await self._get(found)
            if response.location is None:
                return response.body
            try:
                url = urljoin(url, response.location)
            except ValueError:
                raise ResponseError("the server redirects to no URL") from None
            found = parse_media_url(url, self._hosts)
        raise ResponseError(f"the server redirects over {MAX_REDIRECTS} times")

    async def _get(self, url: MediaUrl) -> Response:
        stream, writer = await self._open(url.host)
        try:
            writer.write(
                f"GET {url.target} HTTP/1.1\r\nHost: {url.host}\r\nUser-Agent: Octavo\r\n"
                "Accept: image/png, image/jpeg, image/webp, image/gif\r\n"
                "Accept-Encoding: identity\r\nConnection: close\r\n\r\n".encode("ascii")
            )
            response = Response(self._max_bytes)
            await response.read(stream)
        except OSError:
            raise ResponseError("the connection was lost") from None
        finally:
            writer.transport.abort()
        return response

    async def _open(self, host: MediaHost) -> tuple[StreamReader, StreamWriter]:
        try:
            addresses = await self._resolve(host.name, host.port)
        except (OSError, UnicodeError):
            raise ResponseError("its name cannot be resolved") from None
        if not addresses or not all(is_public(address) for address in addresses):
            log.warning("media_address_refused", host=host.name, addresses=list(addresses)[:8])
            raise ResponseError("it has no public address")
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await self._connect(address, host.port, host.name)
            except OSError as error:
                log.info("media_host_unreachable", host=host.name, reason=type(error).__name__)
        raise ResponseError("no connection to it can be opened")


def _failure(host: MediaHost, reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the image could not be fetched from {host}: {reason}")
