"""Finds the path that a caller may have meant."""

import difflib
from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route

_MAX_CHARACTERS = 256
"""Limit of a path that is compared."""
_MAX_PARTS = 8
"""Last parts of a path of which endings are looked for."""
_LIKENESS = 0.8


def nearest_path(path: str, routes: Iterable[BaseRoute]) -> str | None:
    """Returns the served path that is most like one that is not served; None if none is like it."""
    if len(path) > _MAX_CHARACTERS:
        return None
    served = [route for route in routes if isinstance(route, Route)]
    parts = [part for part in path.split("/") if part][-_MAX_PARTS:]
    for index in range(len(parts)):
        ending = "/" + "/".join(parts[index:])
        for candidate in (f"/v1{ending}", ending):
            if candidate != path and any(_is_served(candidate, route) for route in served):
                return candidate
    literal = [route.path for route in served if not route.param_convertors]
    return next(iter(difflib.get_close_matches(path, literal, n=1, cutoff=_LIKENESS)), None)


def _is_served(path: str, route: Route) -> bool:
    scope = {"type": "http", "path": path, "method": "GET"}
    return route.matches(scope)[0] is not Match.NONE
