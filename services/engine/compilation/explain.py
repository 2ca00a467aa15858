"""Says whether compiled pieces on disk fit a configuration, and what keeps them from it."""

from pathlib import Path

from services.engine.compilation.artifact_cache import ArtifactCache, stored_factors
from services.engine.compilation.cache_key import Factors

_MAX_SHOWN = 8
_MAX_VALUE_LENGTH = 40


def explain(cache_dir: Path, factors: Factors) -> str:
    """Compares the factors of a configuration with those that pieces were compiled under.

    Args:
        cache_dir: holds the pieces of all configurations.
        factors: those of the configuration in question.

    Returns:
        Lines for a person: the folder that fits, or the nearest ones and their differences.
    """
    stored = list(stored_factors(cache_dir))
    for cache, other in stored:
        if other.key == factors.key:
            return f"{cache.folder}: {_pieces(cache)} for this configuration"
    lines = [f"nothing compiled for this configuration in {cache_dir.expanduser()}"]
    nearest = sorted(stored, key=lambda pair: len(factors.differences(pair[1])))
    for cache, other in nearest[:_MAX_SHOWN]:
        names = factors.differences(other)
        differ = "1 factor differs" if len(names) == 1 else f"{len(names)} factors differ"
        lines += ["", f"{cache.folder.name}: {_pieces(cache)}; {differ}"]
        lines += [_difference(name, factors, other) for name in names[:_MAX_SHOWN]]
        if len(names) > _MAX_SHOWN:
            lines.append(f"  and {len(names) - _MAX_SHOWN} more")
    return "\n".join(lines)


def _difference(name: str, here: Factors, there: Factors) -> str:
    """Writes one factor as it is here and as it was there."""
    return f"  {name}: here {_value(here, name)}, there {_value(there, name)}"


def _value(factors: Factors, name: str) -> str:
    value = factors.values.get(name)
    if value is None:
        return "absent"
    return value if len(value) <= _MAX_VALUE_LENGTH else value[: _MAX_VALUE_LENGTH - 3] + "..."


def _pieces(cache: ArtifactCache) -> str:
    number = cache.num_artifacts
    return "1 compiled piece" if number == 1 else f"{number} compiled pieces"
