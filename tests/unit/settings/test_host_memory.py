"""The memory that a host, or a container with a limit, can still give."""

import pytest

from services.settings.host_memory import available_host_bytes

GIB = 2**30


@pytest.fixture
def root(tmp_path):
    write(tmp_path, "proc/meminfo", f"MemTotal: {2**27} kB\nMemAvailable: {64 * 2**20} kB\n")
    return tmp_path


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def write_group(root, path, limit, used, cached=0):
    folder = f"sys/fs/cgroup/{path}"
    write(root, f"{folder}/memory.max", limit)
    write(root, f"{folder}/memory.current", used)
    write(root, f"{folder}/memory.stat", f"anon 1\ninactive_file {cached}\nactive_file 0")


def test_a_host_without_limits_gives_what_the_kernel_says(root):
    assert available_host_bytes(root) == 64 * GIB
    write(root, "proc/self/cgroup", "0::/user.slice")
    write_group(root, "user.slice", "max", GIB)
    assert available_host_bytes(root) == 64 * GIB
    assert available_host_bytes() > 0


def test_a_containers_limit_counts_without_what_it_uses_and_with_its_page_cache(root):
    write(root, "proc/self/cgroup", "0::/")
    write_group(root, "", 16 * GIB, 7 * GIB, cached=3 * GIB)
    assert available_host_bytes(root) == 12 * GIB
    write_group(root, "", 16 * GIB, 17 * GIB)
    assert available_host_bytes(root) == 0


def test_the_least_of_all_groups_counts(root):
    write(root, "proc/self/cgroup", "0::/pod/container")
    write_group(root, "pod", 8 * GIB, 5 * GIB)
    write_group(root, "pod/container", 16 * GIB, 4 * GIB)
    assert available_host_bytes(root) == 3 * GIB


@pytest.mark.parametrize("seen", ["docker/abc", ""])
def test_groups_of_the_first_version_count_where_the_container_sees_them(root, seen):
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/")
    folder = f"sys/fs/cgroup/memory/{seen}"
    write(root, f"{folder}/memory.limit_in_bytes", 16 * GIB)
    write(root, f"{folder}/memory.usage_in_bytes", 6 * GIB)
    write(root, f"{folder}/memory.stat", f"total_inactive_file {GIB}\ntotal_active_file {GIB}")
    assert available_host_bytes(root) == 12 * GIB
