"""Images come over https from named hosts."""

import asyncio
import ssl

import pytest

from services.frontend.errors import InvalidRequestError
from services.frontend.images.media.fetcher import MediaFetcher, TlsConnector, resolve_host
from services.frontend.images.media.response import MAX_HEADER_BYTES
from tests.support.certificates import Authority
from tests.support.media_network import IMAGE, OK, PUBLIC, Network, redirect


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
