"""Addresses to listen on and to connect to, and the flags that take them."""

import pytest
from pydantic import ValidationError

from services.engine.config.engine_config import EngineConfig
from services.engine.config.serving import ServingConfig
from services.engine.node.config import NodeConfig
from services.frontend.config import FrontendConfig
from services.settings.addresses import bracketed, checked_address

GOOD = [
    "127.0.0.1:50051",
    "localhost:1",
    "[::1]:65535",
    "[fe80::1%eth0]:50051",
    "engine.octavo.svc.cluster.local.:50051",
    "gpu_host-1:50051",
    "b\u00fccher.example:50051",
    "dns:50051",
    "dns:///engine:50051",
    "unix:/run/octavo",
]
BAD = [
    ("engine", "there is no port"),
    ("", "there is no port"),
    (":50051", "there is no host"),
    ("engine:", "the port must be a number from 1 to 65535"),
    ("engine:grpc", "the port must be a number"),
    ("engine:0", "the port must be a number"),
    ("engine:65536", "the port must be a number"),
    ("engine:" + "9" * 5000, "the port must be a number"),
    ("engine:\u0665", "the port must be a number"),
    ("256.0.0.1:50051", "'256.0.0.1' is no IP address"),
    ("[::1:50051", "'[::1' is no IP address"),
    ("::1:50051", "an IPv6 address, and no other, is written in brackets"),
    ("[127.0.0.1]:50051", "an IPv6 address, and no other"),
    ("a b:50051", "'a b' is no name"),
    ("a..b:50051", "'a..b' is no name"),
    ("a" * 64 + ":50051", "is no name"),
    ("//engine:50051", "'//engine' is no name"),
    ("http://engine:50051", "is a URL; gRPC's address is host:port"),
    ("unix:", "the port must be a number"),
]


@pytest.mark.parametrize("address", GOOD)
def test_an_address_that_can_be_dialled_is_taken_as_it_is(address):
    assert checked_address(address) == address


@pytest.mark.parametrize(("address", "problem"), BAD)
def test_any_other_is_refused_with_the_reason(address, problem):
    with pytest.raises(ValueError, match=r"is no host:port|is a URL") as caught:
        checked_address(address)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 300


def test_each_engine_of_a_frontend_needs_an_address():
    assert FrontendConfig(engine_address="a:1, b:2,").engine_addresses == ["a:1", "b:2"]
    with pytest.raises(ValidationError, match="'b' is no host:port: there is no port"):
        FrontendConfig(engine_address="a:1,b")


def test_a_node_refuses_a_head_that_cannot_be_dialled():
    with pytest.raises(
        ValidationError, match="--head: 'gpu:x' is no host:port: the port must be a number"
    ):
        NodeConfig(head="gpu:x")


def test_a_node_follows_torchrun_to_an_ipv6_address(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "::1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert NodeConfig().head == "[::1]:29500"


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
