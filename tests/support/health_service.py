"""A service that has health and nothing else: `python -m tests.support.health_service PORT MODE`.

MODE is what it does: `serve` until SIGTERM; `fail` at once, with a reason on standard error;
`stubborn` serves and ignores SIGTERM; any other MODE is a file: the first run creates it and
serves, later ones fail.
"""

import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main() -> None:
    """Serves."""
    port, mode = sys.argv[1:]
    marker = Path(mode)
    if mode == "fail" or marker.exists():
        sys.exit("the model folder is missing")
    if mode not in ("serve", "stubborn"):
        marker.touch()
    server = grpc.server(ThreadPoolExecutor())
    servicer = health.HealthServicer()
    for name in ("", "liveness"):
        servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: mode == "stubborn" or stop.set())
    server.start()
    stop.wait()
    server.stop(None)


if __name__ == "__main__":
    main()
