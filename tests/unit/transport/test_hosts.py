"""Names under which a server answers."""

import pytest

from services.transport.hosts import AllowedHosts

LOOPBACK = ["localhost", "LOCALHOST.:8000", "127.0.0.1", "127.1.2.3:80", "[::1]:8000", "[::1]"]
STRANGE = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "x@localhost",
    "",
]


@pytest.mark.parametrize("listen_host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9"])
def test_a_loopback_address_answers_loopback_hosts_alone(listen_host):
    hosts = AllowedHosts(listen_host)
    assert all(map(hosts.allow, LOOPBACK))
    assert not any(map(hosts.allow, [*STRANGE, "10.0.0.1", "[2001:db8::1]"]))


def test_another_address_answers_all_hosts():
    assert all(map(AllowedHosts("0.0.0.0").allow, [*LOOPBACK, *STRANGE]))


@pytest.mark.parametrize("listen_host", ["127.0.0.1", "0.0.0.0", "::"])
def test_names_that_are_given_are_answered_and_no_others(listen_host):
    hosts = AllowedHosts(listen_host, ["Chat.example", "frontend"])
    assert all(map(hosts.allow, [*LOOPBACK, "chat.example", "CHAT.EXAMPLE:443", "frontend:8000"]))
    assert not any(map(hosts.allow, [*STRANGE, "a.chat.example"]))
    assert hosts.allow("10.1.2.3:8000") == (listen_host != "127.0.0.1")


def test_a_caller_without_a_host_is_no_page():
    assert AllowedHosts("127.0.0.1").allow(None)
