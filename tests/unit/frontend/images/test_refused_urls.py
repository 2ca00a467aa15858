"""URLs of other hosts and names of private addresses lead to no connection."""

import pytest

from services.frontend.errors import InvalidRequestError
from services.frontend.images.media.addresses import is_public
from services.frontend.images.media.urls import MAX_URL_CHARACTERS, MediaHost
from tests.support.media_network import PUBLIC, Network

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
