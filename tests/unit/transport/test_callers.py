"""Which callers share a limit."""

import pytest

from services.transport.callers import address_of


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.1:4711", "192.0.2.1"),
        ("ipv6:%5B2001:db8:0:1:2:3:4:5%5D:4711", "2001:db8:0:1::/64"),
        ("ipv6:[2001:db8:0:1::9]:4711", "2001:db8:0:1::/64"),
        ("ipv6:%5B::ffff:192.0.2.1%5D:4711", "192.0.2.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4711", "fe80::/64"),
        ("unix:/run/octavo.sock", "unix:/run/octavo.sock"),
    ],
)
def test_a_host_is_one_caller_whatever_its_port(peer, address):
    assert address_of(peer) == address
