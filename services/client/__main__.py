"""The `octavo` program: `python -m services.client` is the same."""

import signal

from services.processes.grpc_variables import set_grpc_variables
from services.processes.stop_signals import end_quietly_on_interrupt


def main() -> None:
    """Runs the command line; an interrupt ends its imports, which take a second, quietly."""
    before = signal.getsignal(signal.SIGINT)
    end_quietly_on_interrupt()
    set_grpc_variables()
    from services.client.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
