"""Runs the engine service: `python -m services.engine --help`.

Subcommands: `cache explain` lists compiled pieces for the same flags, `replay` runs a recording's
steps again, `graphs plan` proposes capture sizes, `worker-node` runs ranks of an engine on another
host.
"""

from services.processes.address_space import require_address_space
from services.processes.stop_signals import end_quietly_on_interrupt

if __name__ == "__main__":
    end_quietly_on_interrupt()  # now: the other imports take a second
    require_address_space("octavo engine")  # and the space

import sys

from services.processes.allocator import share_arenas
from services.processes.descriptors import raise_descriptor_limit
from services.processes.standard_error import replace_standard_error
from services.settings.installation import MissingExtraError, require_extras

USAGE_ERROR = 2


def main() -> int:
    """Runs what the arguments ask for and returns the process's exit status."""
    try:
        require_extras("engine")
    except MissingExtraError as error:
        print(f"octavo: {error}", file=sys.stderr)  # noqa: T201  for the operator
        return USAGE_ERROR
    from services.engine.command import run  # its imports need the extra

    return run(sys.argv[1:])


if __name__ == "__main__":
    raise_descriptor_limit()
    share_arenas()
    replace_standard_error()
    sys.exit(main())
