"""Addresses to listen on: brackets of IPv6, and ports that differ."""

import pytest
from pydantic import ValidationError

from services.engine.config.engine_config import EngineConfig
from services.engine.config.serving import ServingConfig
from services.frontend.config import FrontendConfig
from services.listen_address import bracketed


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


@pytest.mark.parametrize(
    ("read", "ports", "flags"),
    [
        (FrontendConfig, {"port": 8000, "http_port": 8000}, ("--http-port", "--port")),
        (FrontendConfig, {"http_port": 8000, "metrics_port": 8000}, ("--metrics-port", "--http")),
        (EngineConfig.from_flags, {"port": 8000, "metrics_port": 8000}, ("--metrics", "--port")),
    ],
)
def test_listeners_of_a_service_have_ports_of_their_own(read, ports, flags):
    with pytest.raises(
        ValidationError, match=f"{flags[0]}.* is 8000: it must differ from {flags[1]}"
    ):
        read(**ports)
    read(**dict.fromkeys(ports, 0))
