"""Images in data URLs, and in https URLs of named hosts that are public."""

import asyncio
import base64
import ssl
from collections.abc import Sequence

import pytest

from services.frontend.errors import InvalidRequestError
from services.frontend.images.media.addresses import is_public
from services.frontend.images.media.data_url import from_data_url, is_data_url
from services.frontend.images.media.fetcher import MediaFetcher, TlsConnector, resolve_host
from services.frontend.images.media.response import MAX_HEADER_BYTES
from services.frontend.images.media.urls import MAX_URL_CHARACTERS, MediaHost
from tests.support.certificates import Authority

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


async def test_an_image_comes_from_the_address_that_was_resolved():
    network = Network()
    assert await network.fetcher().fetch("https://images.example.com/a.png?b=c#d") == IMAGE
    assert network.resolved == [("images.example.com", 443)]
    assert network.connected == [(PUBLIC, 443, "images.example.com")]
    [request] = network.sent
    assert request.startswith(b"GET /a.png?b=c HTTP/1.1\r\nHost: images.example.com\r\n")
    assert b"Accept-Encoding: identity\r\n" in request
    assert network.num_open == 0


@pytest.mark.parametrize(
    ("url", "target", "host"),
    [
        ("HTTPS://Images.EXAMPLE.com", b"/", b"images.example.com"),
        ("https://images.example.com:443/a", b"/a", b"images.example.com"),
        ("https://cdn.example.com:8443?a=b", b"/?a=b", b"cdn.example.com:8443"),
        ("https://images.example.com/a@b:c/%2e%2e//d", b"/a@b:c/%2e%2e//d", b"images.example.com"),
    ],
)
async def test_named_hosts_are_written_in_several_ways(url, target, host):
    network = Network()
    assert await network.fetcher().fetch(url) == IMAGE
    assert network.sent[0].startswith(b"GET " + target + b" HTTP/1.1\r\nHost: " + host + b"\r\n")


REFUSED_URLS = [
    "",
    "/etc/passwd",
    "file:///etc/passwd",
    "http://images.example.com/",
    "ftp://images.example.com/",
    "gopher://images.example.com/",
    "dict://images.example.com/",
    "jar:https://images.example.com/!/a",
    "//images.example.com/",
    "https:images.example.com",
    "https:/images.example.com/",
    "https:///images.example.com/",
    "https:\\\\images.example.com\\",
    "https://",
    "https://127.0.0.1/",
    "https://127.1/",
    "https://2130706433/",
    "https://0x7f000001/",
    "https://0177.0.0.1/",
    "https://0/",
    "https://[::1]/",
    "https://[::ffff:127.0.0.1]/",
    "https://[fd00:ec2::254]/",
    "https://[fe80::1%25eth0]/",
    "https://169.254.169.254/latest/meta-data/",
    "https://metadata.google.internal/",
    "https://localhost/",
    "https://images.example.com.127.0.0.1.nip.io/",
    "https://images.example.com.evil.example/",
    "https://evil.example/images.example.com",
    "https://evil.example?images.example.com",
    "https://evil.example#@images.example.com/",
    "https://images.example.com@evil.example/",
    "https://evil.example@images.example.com/",
    "https://user:pass@images.example.com/",
    "https://images.example.com:80/",
    "https://images.example.com:22/",
    "https://images.example.com:0443/@evil.example:22/ HTTP/1.1",
    "https://cdn.example.com/",
    "https://cdn.example.com:443/",
    "https://images.example.com./",
    "https://images.example.com%2eevil.example/",
    "https://images.example.com\\@evil.example/",
    "https://evil.example\\images.example.com/",
    "https://images.example.com /",
    "https://images.example.com/\r\nHost: evil.example",
    "https://images.example.com/a b",
    "https://images.example.com\t.evil.example/",
    "https://images.example.com\0.evil.example/",
    "https://ⓘmages.example.com/",
    "https://images。example。com/",
    "https://images.example.com/ü",
    "https://sub.images.example.com/",
    "https://example.com/",
    "https://*.example.com/",
    " https://images.example.com/",
    "https://images.example.com/" + "a" * MAX_URL_CHARACTERS,
]


@pytest.mark.parametrize("url", REFUSED_URLS)
async def test_other_urls_are_refused_without_resolving_anything(url):
    network = Network()
    with pytest.raises(InvalidRequestError) as refusal:
        await network.fetcher().fetch(url)
    assert len(str(refusal.value)) < 500
    assert network.resolved == network.connected == []


PRIVATE_ADDRESSES = [
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    f"::ffff:{PUBLIC}",
    "64:ff9b::7f00:1",
    "64:ff9b::169.254.169.254",
    "64:ff9b:1::1",
    "100::1",
    "2001::7f00:1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:db8::1",
    "2002:7f00:1::1",
    "2002:a9fe:a9fe::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "2606:4700::1%eth0",
    "fec0::1",
    "ff02::1",
    "not an address",
    "127.1",
]


@pytest.mark.parametrize("address", PRIVATE_ADDRESSES)
async def test_names_of_private_addresses_are_not_connected_to(address):
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        network = Network(addresses=addresses)
        with pytest.raises(InvalidRequestError, match="it has no public address"):
            await network.fetcher().fetch("https://images.example.com/")
        assert network.connected == []


@pytest.mark.parametrize(
    "address", [PUBLIC, "1.1.1.1", "2606:4700::1", "2001:4860:4860::8888", "64:ff9b::5db8:d70e"]
)
def test_public_addresses_are_known(address):
    assert is_public(address)


async def test_a_name_is_resolved_once():
    network = Network()
    answers = [[PUBLIC], ["127.0.0.1"]]
    network.resolve = lambda name, port: asyncio.sleep(0, answers.pop(0))
    await network.fetcher().fetch("https://images.example.com/")
    assert network.connected == [(PUBLIC, 443, "images.example.com")]
    assert answers == [["127.0.0.1"]]


async def test_a_name_without_an_address_is_refused():
    network = Network(addresses=[])
    with pytest.raises(InvalidRequestError, match="it has no public address"):
        await network.fetcher().fetch("https://images.example.com/")

    async def fail(name: str, port: int):
        raise OSError

    network.resolve = fail
    with pytest.raises(InvalidRequestError, match="its name cannot be resolved"):
        await network.fetcher().fetch("https://images.example.com/")


async def test_other_addresses_are_tried():
    network = Network(addresses=["1.1.1.1", "1.0.0.1", PUBLIC, "8.8.8.8"])
    network.unreachable = {"1.1.1.1", "1.0.0.1"}
    assert await network.fetcher().fetch("https://images.example.com/") == IMAGE
    network.unreachable.add(PUBLIC)
    with pytest.raises(InvalidRequestError, match="no connection to it can be opened"):
        await network.fetcher().fetch("https://images.example.com/")
    assert "8.8.8.8" not in {address for address, *_ in network.connected}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirects_to_named_hosts_are_followed(status):
    network = Network([redirect("/b", status), redirect("//cdn.example.com:8443/c", status), OK])
    assert await network.fetcher().fetch("https://images.example.com/a") == IMAGE
    assert [port for _, port, _ in network.connected] == [443, 443, 8443]
    assert network.resolved[2] == ("cdn.example.com", 8443)
    assert network.sent[1].startswith(b"GET /b HTTP/1.1")


@pytest.mark.parametrize(
    "location",
    [
        "https://evil.example/",
        "http://images.example.com/",
        "//169.254.169.254/latest",
        "https://images.example.com:22/",
        "file:///etc/passwd",
        "https://[::1",
        "https://images.example.com@evil.example/",
        "\\\\evil.example\\",
    ],
)
async def test_redirects_elsewhere_are_refused(location):
    network = Network([redirect(location)])
    with pytest.raises(InvalidRequestError):
        await network.fetcher().fetch("https://images.example.com/")
    assert len(network.connected) == 1


async def test_redirects_end():
    network = Network([redirect("/again")] * 9)
    with pytest.raises(InvalidRequestError, match="redirects over 3 times"):
        await network.fetcher().fetch("https://images.example.com/")
    assert len(network.connected) == 4


async def test_a_redirect_to_a_private_address_is_not_followed():
    network = Network([redirect("https://cdn.example.com:8443/")])

    async def resolve(name: str, port: int):
        return ["10.0.0.1"] if name.startswith("cdn") else [PUBLIC]

    network.resolve = resolve
    with pytest.raises(InvalidRequestError, match="it has no public address"):
        await network.fetcher().fetch("https://images.example.com/")
    assert len(network.connected) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 206 Partial\r\nContent-Length: 1\r\n\r\nx", "status 206"),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", "status 304"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nx", "cut off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "cut off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n", "over 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001, "over 1000 bytes"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"100\r\n%b\r\n" % bytes(256) * 9,
            "over 1000 bytes",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", "compressed"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * MAX_HEADER_BYTES * 3, "headers have over"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx", "no HTTP"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "no HTTP"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n", "cut off"),
        (b"\x15\x03\x01", "no HTTP"),
    ],
)
async def test_answers_that_are_no_image_are_refused(answer, reason):
    network = Network([answer])
    with pytest.raises(InvalidRequestError, match=f"fetched from images.example.com: .*{reason}"):
        await network.fetcher().fetch("https://images.example.com/")
    assert network.num_open == 0


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"more",
        b"HTTP/1.0 200 OK\r\n\r\n" + IMAGE,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
        % (len(IMAGE), IMAGE),
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
        OK.replace(b"OK\r\n", b"OK\r\nContent-Encoding: identity\r\n"),
    ],
)
async def test_bodies_end_in_several_ways(answer):
    network = Network([answer])
    body = await network.fetcher().fetch("https://images.example.com/")
    assert body.startswith(IMAGE)


async def test_slow_servers_are_given_up_after_the_time_limit():
    network = Network([b""])
    with pytest.raises(InvalidRequestError, match=r"it took over 0\.05 s"):
        await network.fetcher(timeout_s=0.05).fetch("https://images.example.com/")
    assert network.num_open == 0


async def test_without_hosts_no_url_is_fetched():
    network = Network()
    fetcher = MediaFetcher([], max_bytes=9, resolve=network.resolve, connect=network.connect)
    with pytest.raises(InvalidRequestError, match="the operator names hosts with --media-hosts"):
        await fetcher.fetch("https://images.example.com/")
    assert network.resolved == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "example",
        "*.example.com",
        "https://example.com",
        "example.com/",
        "example.com:",
        "example.com:0",
        "example.com:65536",
        "user@example.com",
        "10.0.0.1",
        "0x7f.1",
        "[::1]",
        "-a.example",
        "a..example",
        "ü.example",
        "a.example.",
        "a." * 200 + "example",
    ],
)
def test_only_names_are_media_hosts(text):
    with pytest.raises(ValueError, match=r"is no host name|has no port"):
        MediaHost.parse(text)


async def test_connections_check_the_certificate_of_the_name(tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    pair = authority.issue("server", "images.example.com")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    names: list[str] = []
    context.sni_callback = lambda _socket, name, _context: names.append(name)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with server:
        untrusting = TlsConnector()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.cert))
        trusting = TlsConnector()
        with pytest.raises(ssl.SSLCertVerificationError):
            await untrusting("127.0.0.1", port, "images.example.com")
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            await trusting("127.0.0.1", port, "cdn.example.com")

        async def to_server(address: str, to_port: int, name: str):
            assert (address, to_port) == (PUBLIC, 443)
            return await trusting("127.0.0.1", port, name)

        network = Network()
        network.connect = to_server
        assert await network.fetcher().fetch("https://images.example.com/") == IMAGE
    assert names[-1] == "images.example.com"


async def test_the_system_resolves_names():
    assert "127.0.0.1" in await resolve_host("localhost", 443)


@pytest.mark.parametrize(
    "prefix",
    [
        "data:image/png;base64,",
        "DATA:IMAGE/PNG;BASE64,",
        "data:image/svg+xml;charset=utf-8;base64,",
        "data:image/png;name=a.png;base64,",
    ],
)
def test_data_urls_have_the_bytes_of_an_image(prefix):
    url = prefix + base64.b64encode(IMAGE).decode()
    assert is_data_url(url)
    assert from_data_url(url, max_bytes=len(IMAGE)) == IMAGE


def test_line_ends_in_base64_are_left_out():
    text = base64.encodebytes(bytes(200)).decode()
    assert from_data_url(f"data:image/png;base64,{text}", max_bytes=200) == bytes(200)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:", "is not data:image"),
        ("data:image/png;base64", "is not data:image"),
        ("data:image/png" + ";a=b" * 9999 + ";base64,AAAA", "is not data:image"),
        ("data:,AAAA", "'text/plain' instead of an image"),
        ("data:text/html;base64,AAAA", "'text/html' instead of an image"),
        ("data:video/mp4;base64,AAAA", "'video/mp4' instead of an image"),
        ("data:image/png,AAAA", "not in base64"),
        ("data:image/png;base64,AAA", "no valid base64"),
        ("data:image/png;base64,A*AA", "no valid base64"),
        ("data:image/png;base64,AA==AAAA", "no valid base64"),
        ("data:image/png;base64,ÄAAA", "no valid base64"),
        ("data:image/png;base64," + "AAAA" * 1000, "over 99 bytes"),
        ("data:image/png;base64," + "AAAA" * 33 + "AA==", "over 99 bytes"),
    ],
)
def test_other_data_urls_are_refused(url, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        from_data_url(url, max_bytes=99)
