"""A service with too little address space ends with the reason, before it needs more."""

import re
import resource
import subprocess
import sys

import pytest

from services.processes.address_space import address_space_left
from services.processes.helper_program import limit_resources


@pytest.mark.parametrize("mib", [300, 600, 800, 1200])
@pytest.mark.parametrize("service", ["frontend", "engine"])
def test_a_limit_that_no_service_can_live_with_ends_the_start_with_one_line(service, mib):
    ended = subprocess.run(
        [
            *("sh", "-c", 'ulimit -v "$1"; shift; exec "$@"', "sh", str(mib * 1024)),
            *(sys.executable, "-P", "-m", f"services.{service}", "--help"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    said = rf"octavo {service}: .*\(ulimit -v\) is {mib} MiB; it must be at least \d+ MiB\n"
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(said, ended.stderr)


def test_helpers_keep_a_limit_that_is_lower_than_their_own(monkeypatch):
    most = {resource.RLIMIT_AS: 2**29}
    taken = {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, most.get(kind, -1)))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: taken.update({kind: limits}))
    limit_resources(max_memory_bytes=2**30)
    assert taken[resource.RLIMIT_AS] == (2**29, 2**29)
    assert taken[resource.RLIMIT_FSIZE] == (0, 0)


def test_what_is_left_is_what_the_limit_allows_beside_what_is_mapped(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**50, resource.RLIM_INFINITY))
    left = address_space_left()
    assert left is not None
    assert 0 < left < 2**50
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert address_space_left() is None
