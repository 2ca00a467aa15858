"""The smg gateway from PyPI, as a process on a free loopback port."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import httpx

from tests.support.processes import ServiceFailedError, free_port

READY_TIMEOUT_S = 60


def missing_part() -> str:
    """Returns why the gateway cannot run here; empty where it can."""
    return "" if find_spec("smg") else "smg has no wheel for this platform"


@contextmanager
def smg_gateway(engine_address: str, model: str, *flags: str) -> Iterator[str]:
    """Runs a gateway in front of one engine; yields its URL once it serves the model."""
    port = free_port()
    command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--worker-urls", f"grpc://{engine_address}", *flags]
    with tempfile.NamedTemporaryFile(prefix="smg-", suffix=".log") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_until_ready(process, url, model)
            yield url
        except BaseException as error:
            log.seek(0)
            error.add_note(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            # Asked politely, it waits for five seconds first.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, model: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServiceFailedError(f"smg exited {process.returncode}")
        with suppress(httpx.TransportError):
            is_ready = httpx.get(f"{url}/readiness").status_code == httpx.codes.OK
            if is_ready and model in httpx.get(f"{url}/v1/tokenizers").text:
                return
        time.sleep(0.05)
    raise ServiceFailedError(f"smg was not ready in {READY_TIMEOUT_S} s")
