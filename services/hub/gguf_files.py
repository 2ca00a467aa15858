"""Finds the files of a GGUF model by their names."""

import re
from collections.abc import Collection

from services.hub.names import HubError

SUFFIX = ".gguf"
MAX_SHARDS = 1000

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_PROJECTOR = "mmproj"
"""Start of the names of files that hold a vision tower alone."""
_MAX_SHOWN = 8


def choose_files(place: str, names: Collection[str], wanted: str = "") -> tuple[str, ...]:
    """Returns the file of a model, or all its shards in order.

    Args:
        place: a folder or repository, for messages.
        names: all files in it, as paths with slashes.
        wanted: one of them, which --gguf-file names; empty: there is one model only.

    Raises:
        HubError: there is no such model, several, or a shard is missing.
    """
    models = sorted(name for name in names if _stands_for_model(name))
    if wanted:
        if wanted not in names or not wanted.endswith(SUFFIX):
            raise HubError(f"{place} has no {wanted}; its GGUF files are {_listed(models)}")
        models = [wanted]
    if not models:
        raise HubError(f"{place} has no GGUF model")
    if len(models) > 1:
        raise HubError(f"{place} has several GGUF models; choose by --gguf-file: {_listed(models)}")
    shards = shard_names(models[0])
    missing = [name for name in shards if name not in names]
    if missing:
        raise HubError(f"{place} lacks {len(missing)} of {len(shards)} shards: {_listed(missing)}")
    return shards


def shard_names(name: str) -> tuple[str, ...]:
    """Returns the names of all shards of a model, of which one has this name."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return (name,)
    count = int(match["count"])
    if not 1 <= count <= MAX_SHARDS:
        raise HubError(f"{name} is one of {count} shards; the limit is {MAX_SHARDS}")
    stem = match["stem"]
    return tuple(f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))


def model_name(name: str) -> str:
    """Returns a file's name without suffix and number of the shard."""
    match = _SHARD.fullmatch(name)
    return name.removesuffix(SUFFIX) if match is None else match["stem"]


def _stands_for_model(name: str) -> bool:
    """Returns whether a file is a whole model or a first shard, and no vision tower."""
    own_name = name.rpartition("/")[2]
    match = _SHARD.fullmatch(own_name)
    is_first = match is None or int(match["number"]) == 1
    return own_name.endswith(SUFFIX) and is_first and not own_name.startswith(_PROJECTOR)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more
