"""Limits of connections: in all, by address, and the connections that give way."""

import pytest

from services.transport.connections import Connections, Place, address_of
from services.transport.counts import LocalCounts


def taken(connections: Connections, host: str) -> Place:
    place = connections.take(host)
    assert place is not None
    return place


def test_slots_are_counted_in_all_and_by_address() -> None:
    counts = LocalCounts()
    connections = Connections(counts, "c", limit=3, limit_per_address=2)
    first, *_ = taken(connections, "192.0.2.1"), taken(connections, "192.0.2.1")
    assert connections.take("192.0.2.1") is None
    taken(connections, "192.0.2.2")
    assert connections.take("192.0.2.3") is None
    first.leave()
    first.leave()
    taken(connections, "192.0.2.3")
    assert counts.held("c") == 3


def test_the_longest_idle_connection_gives_way_and_a_busy_one_does_not() -> None:
    connections = Connections(LocalCounts(), "c", limit=3, limit_per_address=3)
    places = [taken(connections, f"192.0.2.{i}") for i in range(3)]
    closed: list[int] = []
    for i in (1, 0, 2):
        places[i].wait(lambda i=i: closed.append(i))  # type: ignore[misc]
    places[1].work()
    places[1].wait(lambda: closed.append(1))  # it has waited for less time now
    for _ in range(3):
        taken(connections, "192.0.2.9")
    assert closed == [0, 2, 1]
    assert connections.take("192.0.2.10") is None


def test_an_address_at_its_limit_closes_its_own_connections_only() -> None:
    connections = Connections(LocalCounts(), "c", limit=3, limit_per_address=1)
    closed: list[str] = []
    for host in ("192.0.2.1", "192.0.2.2"):
        taken(connections, host).wait(lambda host=host: closed.append(host))  # type: ignore[misc]
    taken(connections, "192.0.2.2")
    assert closed == ["192.0.2.2"]
    assert connections.take("192.0.2.2") is None


def test_a_slot_that_was_left_does_not_wait() -> None:
    connections = Connections(LocalCounts(), "c", limit=1, limit_per_address=1)
    place = taken(connections, "192.0.2.1")
    place.leave()
    place.wait(pytest.fail)
    taken(connections, "192.0.2.1")
    assert connections.take("192.0.2.1") is None


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::2:3:4:5", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_addresses_of_one_host_count_together(host: str, address: str) -> None:
    assert address_of(host) == address
