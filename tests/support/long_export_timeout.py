"""Runs a service that waits long for its collector of traces, which here is a test.

python -m tests.support.long_export_timeout takes the flags of the engine or, with --engine-address,
of the frontend.
"""

import sys

from services.processes.grpc_variables import set_grpc_variables

EXPORT_TIMEOUT_S = 60.0


def main() -> int:
    """Runs the service."""
    set_grpc_variables()  # as both do before they import gRPC
    from services.telemetry import spans

    spans.EXPORT_TIMEOUT_S = EXPORT_TIMEOUT_S
    if "--engine-address" in sys.argv:
        from services.frontend import __main__ as service
    else:
        from services.engine import __main__ as service
    return service.main()


if __name__ == "__main__":
    sys.exit(main())
