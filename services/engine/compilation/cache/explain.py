"""Explains whether compiled pieces and traces on disk fit a configuration."""

from collections.abc import Callable, Mapping
from pathlib import Path

from services.engine.compilation.cache.artifact_cache import TRACES, ArtifactCache, stored_factors
from services.engine.compilation.cache.cache_key import Factors
from services.engine.compilation.cache.key_fields import FLAGS_BY_REASON, RELEVANT_FLAGS
from services.engine.compilation.cache.program_store import matches_of_programs

_MAX_SHOWN = 8
_MAX_VALUE_LENGTH = 40


def explain(code_dir: Path, factors: Factors, traces: Factors) -> str:
    """Compares a configuration's factors with those of stored pieces and traces.

    Args:
        code_dir: holds the pieces and traces of all configurations.
        factors: the configuration's, of pieces.
        traces: the configuration's, of traces.

    Returns:
        Lines for a person: of pieces, then of traces, the matching folder with the matches of
        compiler passes, or the nearest ones and their differences; then the settings in the key
        and outside it.
    """
    pieces = _comparison(code_dir, factors, "compiled", _pieces, ArtifactCache.load_matches)
    traced = _comparison(code_dir / TRACES, traces, "traced", _programs, matches_of_programs)
    return "\n".join([*pieces, "", *traced, "", *_settings()])


def _comparison(
    code_dir: Path,
    factors: Factors,
    done: str,
    content_of: Callable[[ArtifactCache], str],
    matches_of: Callable[[ArtifactCache], Mapping[str, int]],
) -> list[str]:
    stored = list(stored_factors(code_dir))
    for cache, other in stored:
        if other.key == factors.key:
            lines = [f"{cache.folder}: {content_of(cache)} for this configuration"]
            matches = matches_of(cache)
            if matches:
                listed = ", ".join(f"{name} {count}" for name, count in matches.items())
                lines.append(f"matches of compiler passes: {listed}")
            return lines
    lines = [f"nothing {done} for this configuration in {code_dir}"]
    nearest = sorted(stored, key=lambda pair: len(factors.differences(pair[1])))
    for cache, other in nearest[:_MAX_SHOWN]:
        names = factors.differences(other)
        differ = "1 factor differs" if len(names) == 1 else f"{len(names)} factors differ"
        lines += ["", f"{cache.folder.name}: {content_of(cache)}; {differ}"]
        lines += [_difference(name, factors, other) for name in names[:_MAX_SHOWN]]
        if len(names) > _MAX_SHOWN:
            lines.append(f"  and {len(names) - _MAX_SHOWN} more")
    return lines


def _settings() -> list[str]:
    lines = ["settings in the key:", *(f"  {name}: {why}" for name, why in RELEVANT_FLAGS.items())]
    lines.append("settings left out:")
    for why, names in FLAGS_BY_REASON.items():
        lines.append(f"  {', '.join(names)}: {why}")
    return lines


def _difference(name: str, here: Factors, there: Factors) -> str:
    return f"  {name}: here {_value(here, name)}, there {_value(there, name)}"


def _value(factors: Factors, name: str) -> str:
    value = factors.values.get(name)
    if value is None:
        return "absent"
    return value if len(value) <= _MAX_VALUE_LENGTH else value[: _MAX_VALUE_LENGTH - 3] + "..."


def _pieces(cache: ArtifactCache) -> str:
    number = cache.num_artifacts
    return "1 compiled piece" if number == 1 else f"{number} compiled pieces"


def _programs(cache: ArtifactCache) -> str:
    number = len(cache.program_names)
    return "1 traced program" if number == 1 else f"{number} traced programs"
