"""Where ranks meet: a file, or a port of one interface."""

import os
import socket

import pytest

from services.engine.worker.meeting import Meeting, interface_address


def test_the_address_of_an_interface_is_found():
    assert interface_address("lo") == "127.0.0.1"


def test_an_interface_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="interface nothing0 has no IPv4 address"):
        interface_address("nothing0")


def test_ranks_of_several_hosts_meet_on_one_interface_and_no_other():
    meeting = Meeting.on_interface("lo")
    with socket.socket(fileno=meeting.fd) as listening:
        host, port = listening.getsockname()
        assert meeting.address == f"127.0.0.1:{port}"
        assert host == "127.0.0.1"
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def test_ranks_of_one_host_meet_in_a_file_that_is_closed_here():
    meeting = Meeting.in_memory()
    assert meeting.arguments == ["--meeting-fd", str(meeting.fd)]
    meeting.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(meeting.fd)


def test_a_rank_on_another_host_gets_the_address_alone():
    assert Meeting(address="192.0.2.1:9").arguments == ["--meeting-address", "192.0.2.1:9"]
