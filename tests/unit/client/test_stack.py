"""Where the two services of `octavo serve` will listen."""

import socket

import pytest

from services.client.stack import LOOPBACK, plan_stack
from services.client.supervisor import ServiceFailedError
from tests.support.processes import free_port


def test_free_ports_are_chosen_once_so_that_a_restart_keeps_them():
    stack = plan_stack()
    assert stack.engine.address in stack.frontend.command
    assert stack.frontend.address.rpartition(":")[2] in stack.frontend.command


def test_ports_that_are_named_are_kept():
    port, engine_port = free_port(), free_port()
    stack = plan_stack(port=port, engine_port=engine_port)
    assert stack.frontend.address == f"{LOOPBACK}:{port}"
    assert stack.engine.address == f"{LOOPBACK}:{engine_port}"


@pytest.mark.parametrize("whose", ["port", "engine_port"])
def test_a_port_that_somebody_listens_on_is_refused_before_anything_starts(whose):
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServiceFailedError, match=f"{port}: Address already in use"):
            plan_stack(**{whose: port})


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ServiceFailedError, match=r"192\.0\.2\.1:0: Cannot assign"):
        plan_stack(host="192.0.2.1")


def test_a_frontend_on_all_addresses_is_asked_on_loopback():
    stack = plan_stack(host="0.0.0.0")
    assert stack.frontend.address.startswith(LOOPBACK)
    assert "0.0.0.0" in stack.frontend.command
