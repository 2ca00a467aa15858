"""IPv6 addresses to listen on may come without the brackets that host:port needs."""

import pytest

from services.engine.config.serving import ServingConfig
from services.frontend.config import FrontendConfig
from services.listen_host import bracketed


@pytest.mark.parametrize(
    ("host", "form"),
    [
        ("::", "[::]"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("fe80::1%eth0", "[fe80::1%eth0]"),
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
    ],
)
def test_an_ipv6_address_gets_brackets(host, form):
    assert bracketed(host) == form
    assert ServingConfig(host=host).host == form
    assert FrontendConfig(host=host, engine_address="127.0.0.1:1").host == form
