"""The limit of open descriptors is the system's, whatever the shell's default."""

import resource

import pytest

from services.processes.descriptors import MIN_DESCRIPTORS, raise_descriptor_limit


def test_the_limit_becomes_the_highest_that_is_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = before[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, most), most))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("most", [8, MIN_DESCRIPTORS - 1])
def test_a_limit_that_no_service_can_live_with_ends_the_start_with_its_name(monkeypatch, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    with pytest.raises(SystemExit, match=rf"ulimit -Hn\) is {most}; it must be at least"):
        raise_descriptor_limit()
