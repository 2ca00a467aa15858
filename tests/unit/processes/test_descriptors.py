"""The limit of open descriptors is the system's, whatever the shell's default."""

import resource

from services.processes.descriptors import raise_descriptor_limit


def test_the_limit_becomes_the_highest_that_is_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = before[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, most), most))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
