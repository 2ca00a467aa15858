"""Environment variables that look like settings and are none."""

import os
from collections.abc import Iterable

import structlog

log = structlog.get_logger()


def warn_of_unknown_variables(prefix: str, settings: Iterable[str]) -> None:
    """Logs the variables that begin with a prefix and name no setting, as misspelt ones do.

    They end no start, unlike flags: a deployment may set variables for a newer release, and
    Kubernetes sets OCTAVO_ENGINE_SERVICE_HOST for a service of the name octavo-engine.

    Args:
        prefix: of a program's variables, in capitals.
        settings: the program's settings, as its configuration names them.
    """
    known = {prefix + name.upper() for name in settings}
    # As settings are read: in any case of letters.
    found = (name for name in os.environ if name.upper().startswith(prefix))
    if names := sorted(name for name in found if name.upper() not in known):
        log.warning("unknown_environment_variables", names=names)
