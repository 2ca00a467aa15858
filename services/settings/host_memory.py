"""The memory that the host can still give to this process."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_FIELDS = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
"""Files of the limit and of the use, and fields of the page cache, in either version of cgroups.
Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst."""


def available_host_bytes(root: Path = ROOT) -> int:
    """Returns the least that the kernel and the limits of this process's cgroups leave.

    Args:
        root: of the file system.
    """
    fields = _fields_of(root / "proc/meminfo")
    return min([fields["MemAvailable:"] * 2**10, *_rooms(root)])


def _rooms(root: Path) -> Iterator[int]:
    """Yields the bytes that are left in each cgroup of this process with a limit of memory."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        kind = "memory" if controllers else ""
        mount = root / "sys/fs/cgroup" / kind
        # A container may not see the folder of its own group, but sees the group as the root.
        folder = mount / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(mount) and (room := _room(each, kind)) is not None:
                yield room


def _room(folder: Path, kind: str) -> int | None:
    """Returns the bytes that are left in a cgroup; None without a limit."""
    limit_name, used_name, cache_names = _FIELDS[kind]
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        used = int((folder / used_name).read_text())
        fields = _fields_of(folder / "memory.stat")
    except OSError:
        return None
    # The kernel takes the page cache back before it ends a process.
    cached = sum(fields.get(name, 0) for name in cache_names)
    return max(0, int(limit) - max(0, used - cached))


def _fields_of(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines() if line)
    return {name: int(value) for name, value, *_ in lines}
