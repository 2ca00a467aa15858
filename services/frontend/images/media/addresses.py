"""Separates public internet addresses from addresses of private networks and machines."""

import ipaddress

_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_REFUSED_IPV4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # a public address, but the metadata service of Azure's machines
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",  # multicast, reserved and broadcast
    )
)
"""IANA's special-purpose IPv4 addresses, whatever the version of Python knows of them."""
_REFUSED_IPV6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, with Teredo, which embeds IPv4 addresses
        "2001:db8::/32",
        "2002::/16",  # 6to4, which embeds IPv4 addresses
        "2620:4f:8000::/48",
        "3fff::/20",
    )
)
"""IANA's special-purpose addresses within global unicast."""


def is_public(text: str) -> bool:
    """Whether an IP address is one that any machine on the internet could connect to.

    An IPv6 address that stands for an IPv4 address by NAT64, as networks without IPv4 have it, is
    as public as that one; other embeddings are refused.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return False
        if address not in _NAT64:
            return address in _GLOBAL_UNICAST and not any(address in net for net in _REFUSED_IPV6)
        address = ipaddress.IPv4Address(address.packed[-4:])
    return not any(address in network for network in _REFUSED_IPV4)
