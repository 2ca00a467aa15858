"""A network for tests of fetching images: it resolves and answers as a test says."""

import asyncio
from collections.abc import Sequence

from services.frontend.images.media.fetcher import MediaFetcher
from services.frontend.images.media.urls import MediaHost

HOSTS = ["images.example.com", "cdn.example.com:8443"]
PUBLIC = "93.184.215.14"
IMAGE = b"\x89PNG the image"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(IMAGE), IMAGE)


class Network:
    """A network whose servers answer as they are set, and the connections to it."""

    def __init__(self, answers: Sequence[bytes] = (OK,), addresses: Sequence[str] = (PUBLIC,)):
        self.answers = list(answers)
        self.addresses = addresses
        self.resolved: list[tuple[str, int]] = []
        self.connected: list[tuple[str, int, str]] = []
        self.sent: list[bytes] = []
        self.num_open = 0
        self.unreachable: set[str] = set()

    def fetcher(self, max_bytes: int = 1000, timeout_s: float = 10.0) -> MediaFetcher:
        return MediaFetcher(
            [MediaHost.parse(host) for host in HOSTS],
            max_bytes=max_bytes,
            timeout_s=timeout_s,
            resolve=self.resolve,
            connect=self.connect,
        )

    async def resolve(self, name: str, port: int) -> Sequence[str]:
        self.resolved.append((name, port))
        return self.addresses

    async def connect(self, address: str, port: int, name: str):
        self.connected.append((address, port, name))
        if address in self.unreachable:
            raise ConnectionRefusedError
        stream = asyncio.StreamReader()
        answer = self.answers.pop(0)
        if answer:
            stream.feed_data(answer)
            stream.feed_eof()
        self.num_open += 1
        return stream, self

    @property
    def transport(self) -> "Network":
        return self

    def write(self, content: bytes) -> None:
        self.sent.append(content)

    def abort(self) -> None:
        self.num_open -= 1


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\n\r\n".encode()
