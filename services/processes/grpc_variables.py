"""Environment variables that gRPC reads when it is imported."""

import os


def set_grpc_variables() -> None:
    """Sets what gRPC's C core does in this process, unless the operator has set it.

    It prints no lines of its own: they are in no format of ours, and have text of peers as it came.
    A GOAWAY, which needs no key, could write anything to standard error. It also prepares for no
    forks: other processes are new programs.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
