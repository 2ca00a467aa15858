"""Where the two services of `octavo serve` will listen."""

import contextlib
import dataclasses
import socket

import pytest

from services.client.channel import Tls
from services.client.stack import (
    HTTP_PORT,
    LOOPBACK,
    check_tls,
    closing_lines,
    http_port_of,
    plan_stack,
    with_http,
)
from services.client.supervisor import ServiceFailedError
from tests.support.processes import free_port


def first_of_free_ports(count: int) -> int:
    """Returns a port that is free, as are the next ones."""
    with contextlib.ExitStack() as probes:
        while True:
            first = free_port()
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.create_server((LOOPBACK, port)))
            except OSError:
                continue
            return first


def test_free_ports_are_chosen_once_so_that_a_restart_keeps_them():
    stack = plan_stack()
    [engine] = stack.engines
    assert engine.address in stack.frontend.arguments
    assert stack.frontend.address.rpartition(":")[2] in stack.frontend.arguments


def test_ports_that_are_named_are_kept():
    port, engine_port = free_port(), free_port()
    stack = plan_stack(port=port, engine_port=engine_port)
    assert stack.frontend.address == f"{LOOPBACK}:{port}"
    assert [engine.address for engine in stack.engines] == [f"{LOOPBACK}:{engine_port}"]


def test_several_engines_listen_one_after_the_other_and_the_frontend_knows_all():
    engine_port = first_of_free_ports(3)
    stack = plan_stack(engine_port=engine_port, engine_environments=[{}] * 3)
    addresses = [f"{LOOPBACK}:{engine_port + index}" for index in range(3)]
    assert [engine.address for engine in stack.engines] == addresses
    assert ",".join(addresses) in stack.frontend.arguments
    assert [engine.name for engine in stack.engines] == ["engine-1", "engine-2", "engine-3"]


def test_several_engines_on_free_ports_have_different_ones():
    stack = plan_stack(engine_environments=[{}] * 4)
    assert len({engine.address for engine in stack.engines}) == 4


@pytest.mark.parametrize(("whose", "flag"), [("port", "--port"), ("engine_port", "--engine-port")])
def test_a_taken_port_is_refused_with_its_flag_before_anything_starts(whose, flag):
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        message = rf"{port}: Address already in use \({flag} 0 takes a free one\)"
        with pytest.raises(ServiceFailedError, match=message):
            plan_stack(**{whose: port})


def test_one_port_for_the_frontend_and_an_engine_is_refused():
    port = first_of_free_ports(2)
    with pytest.raises(ServiceFailedError, match=f"cannot both have port {port + 1}"):
        plan_stack(port=port + 1, engine_port=port, engine_environments=[{}] * 2)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ServiceFailedError, match=r"192\.0\.2\.1:0: Cannot assign"):
        plan_stack(host="192.0.2.1")


def test_a_frontend_on_all_addresses_is_asked_on_loopback():
    stack = plan_stack(host="0.0.0.0")
    assert stack.frontend.address.startswith(LOOPBACK)
    assert "0.0.0.0" in stack.frontend.arguments


@pytest.mark.parametrize("host", ["::", "[::]"])
def test_a_frontend_on_all_addresses_of_ipv6_is_asked_on_loopback(host):
    stack = plan_stack(host=host)
    assert stack.frontend.address.startswith("[::1]:")
    assert "[::]" in stack.frontend.arguments


def test_several_engines_have_ports_of_metrics_one_after_the_other():
    port = first_of_free_ports(3)
    stack = plan_stack(engine_environments=[{}] * 3, engine_arguments=[f"--metrics-port={port}"])
    last_words = [engine.arguments[-2:] for engine in stack.engines]
    assert last_words == [["--metrics-port", str(port + index)] for index in range(3)]


def test_a_port_of_metrics_in_the_environment_is_the_first_engines(monkeypatch):
    port = first_of_free_ports(2)
    monkeypatch.setenv("OCTAVO_ENGINE_METRICS_PORT", str(port))
    stack = plan_stack(engine_environments=[{}] * 2)
    assert [engine.arguments[-1] for engine in stack.engines] == [str(port), str(port + 1)]


def test_engines_that_take_free_ports_of_metrics_keep_their_flags():
    stack = plan_stack(engine_environments=[{}] * 2, engine_arguments=["--metrics-port", "0"])
    assert all(engine.arguments[-2:] == ["--metrics-port", "0"] for engine in stack.engines)


def test_a_taken_port_of_metrics_is_refused_before_anything_starts():
    with socket.create_server((LOOPBACK, 0)) as taken:
        flag = f"--metrics-port={taken.getsockname()[1]}"
        with pytest.raises(ServiceFailedError, match="Address already in use"):
            plan_stack(engine_arguments=[flag])


def test_one_port_for_metrics_and_a_service_is_refused():
    port = first_of_free_ports(3)
    with pytest.raises(ServiceFailedError, match=f"cannot both have port {port + 1}"):
        plan_stack(
            engine_port=port + 1,
            engine_environments=[{}] * 2,
            engine_arguments=[f"--metrics-port={port}"],
        )


def test_engines_past_the_last_port_are_refused():
    with pytest.raises(ServiceFailedError, match="ports end at 65535"):
        plan_stack(engine_port=65535, engine_environments=[{}] * 2)


@pytest.mark.parametrize("word", ["many", "70000", "-1"])
def test_a_port_of_metrics_that_is_none_is_refused(word):
    with pytest.raises(ServiceFailedError):
        plan_stack(engine_arguments=[f"--metrics-port={word}"])


def test_the_closing_lines_name_every_address():
    metrics_port = first_of_free_ports(2)
    stack = plan_stack(
        engine_environments=[{}] * 2,
        engine_arguments=["--metrics-port", str(metrics_port)],
        frontend_arguments=["--http-port=8000", "--metrics-port", "9000", "--tls-cert", "c.pem"],
    )
    lines = [" ".join(line.split()) for line in closing_lines(stack)]
    first, second = stack.engines
    assert lines == [
        f"talk to it: octavo chat --frontend {stack.frontend.address}",
        "over HTTP: https://127.0.0.1:8000/v1",
        "metrics: https://127.0.0.1:9000/metrics",
        f"watch it: octavo stats --engine {first.address}",
        f"metrics: http://127.0.0.1:{metrics_port}/metrics",
        f"watch it: octavo stats --engine {second.address}",
        f"metrics: http://127.0.0.1:{metrics_port + 1}/metrics",
    ]


def test_http_takes_the_port_that_is_named():
    port = free_port()
    stack = with_http(plan_stack(), port)
    assert http_port_of(stack) == port
    assert f"over HTTP:   http://{LOOPBACK}:{port}/v1" in closing_lines(stack)


def test_http_takes_the_first_port_that_nothing_else_has():
    with contextlib.ExitStack() as held:
        taken = [HTTP_PORT, HTTP_PORT + 2]
        for port in taken:
            with contextlib.suppress(OSError):  # another process has it
                held.enter_context(socket.create_server((LOOPBACK, port)))
        stack = plan_stack(
            port=first_of_free_ports(1), engine_arguments=[f"--metrics-port={HTTP_PORT + 1}"]
        )
        chosen = http_port_of(with_http(stack, None))
    assert chosen > HTTP_PORT + 2


def test_http_by_default_leaves_the_frontends_own_port_alone():
    stack = plan_stack(port=0)
    frontend = dataclasses.replace(stack.frontend, address=f"{LOOPBACK}:{HTTP_PORT}")
    chosen = http_port_of(with_http(dataclasses.replace(stack, frontend=frontend), None))
    assert chosen > HTTP_PORT


def test_one_named_port_for_http_and_a_service_is_refused():
    stack = plan_stack()
    port = int(stack.frontend.address.rpartition(":")[2])
    with pytest.raises(ServiceFailedError, match=f"cannot both have port {port}"):
        with_http(stack, port)


def test_a_taken_port_that_is_named_for_http_is_refused():
    with (
        socket.create_server((LOOPBACK, 0)) as taken,
        pytest.raises(ServiceFailedError, match="Address already in use"),
    ):
        with_http(plan_stack(), taken.getsockname()[1])


def test_a_port_of_http_among_the_frontends_own_flags_is_kept():
    stack = plan_stack(frontend_arguments=["--http-port=9"])
    assert with_http(stack, None) == stack


def test_a_frontend_with_a_certificate_needs_an_authority_to_be_asked(tmp_path):
    authority = tmp_path / "ca.pem"
    authority.touch()
    tls = Tls(tls_ca=authority)
    certificate = ["--tls-cert", "c.pem"]
    check_tls(plan_stack())
    check_tls(plan_stack(frontend_arguments=certificate, tls=tls))
    with pytest.raises(ServiceFailedError, match="--tls-ca FILE must name its authority"):
        check_tls(plan_stack(frontend_arguments=certificate))
    with pytest.raises(ServiceFailedError, match="has no certificate"):
        check_tls(plan_stack(tls=tls))
