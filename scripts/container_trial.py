"""Builds the images and tries all that docker-compose.yml and its files promise; prints a table."""

import argparse
import contextlib
import datetime
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.container_programs import POLL_S, READY_TIMEOUT_S, ROOT, Containers, TrialError
from tests.support.certificates import LOOPBACK, Authority

BASE = "docker-compose.yml"
TLS = "deploy/docker-compose.tls.yml"
OBSERVABILITY = "deploy/docker-compose.observability.yml"
SERVICES = ("engine", "frontend")
OTHERS = ("prom/prometheus:v3.5.0", "grafana/grafana:12.1.0", "jaegertracing/jaeger:2.9.0")
GRPC, HTTP = f"{LOOPBACK}:50050", f"http://{LOOPBACK}:8000"
KEY = "container-trial-0123456789"
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is 7 + 5?"}],
    "temperature": 0,
    "max_tokens": 16,
}
POST = f"""
import json, urllib.request as r
body = json.dumps({BODY!r}).encode()
headers = {{"content-type": "application/json"}}
q = r.Request("http://frontend:8000/v1/chat/completions", body, headers)
print(json.load(r.urlopen(q, timeout=60))["choices"][0]["message"]["content"])
"""
CONFINEMENT = """
import json, pathlib
status = dict(l.split(":\\t", 1) for l in open("/proc/1/status") if ":\\t" in l)
def is_writable(folder):
    try:
        pathlib.Path(folder, "x").write_text("")
    except OSError:
        return False
    return True
print(json.dumps({
    "uid": int(status["Uid"].split()[0]),
    "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "writable": [f for f in ("/", "/opt/octavo", "/etc", "/home/octavo") if is_writable(f)],
}))
"""


class Trial:
    """Tries one thing after the other, and keeps a row for each."""

    def __init__(self, containers: Containers, folder: Path) -> None:
        self._containers = containers
        self._folder = folder
        self.rows: list[tuple[str, str]] = []

    def run(self) -> None:
        """Tries everything; the first thing that is wrong ends it."""
        steps: dict[str, Callable[[], str]] = {
            "build": self.build,
            "up": self.start,
            "images": self.measure,
            "published": self.look_at_ports,
            "chat from outside": self.ask_from_outside,
            "chat from the client service": self.ask_from_the_client,
            "confinement": self.look_inside,
            "engine killed": self.kill_the_engine,
            "two engines": self.scale,
            "TLS and API keys": self.add_tls,
            "observability": self.add_observability,
        }
        for name, step in steps.items():
            self.note(name, step())

    def note(self, name: str, result: str) -> None:
        """Keeps a row, and shows it."""
        self.rows.append((name, result))
        sys.stderr.write(f"{name}: {result}\n")

    def build(self) -> str:
        """Builds the images from what pip's indexes have."""
        started = time.monotonic()
        self._containers.compose("--profile", "client", "build", files=[BASE])
        # A build whose program was killed has been seen to end with 0.
        images = self._containers.images()
        _expect(len(images) == len((*SERVICES, "client")), f"built: {images}")
        return f"{time.monotonic() - started:.0f} s"

    def start(self) -> str:
        """Starts both services."""
        seconds = self._containers.up(files=[BASE], services=SERVICES)
        return f"both services healthy after {seconds:.0f} s"

    def measure(self) -> str:
        """Measures the images."""
        sizes = []
        for service in SERVICES:
            [container] = self._containers.of(service)
            sizes.append(f"{service} {self._containers.image_bytes(container) / 1e9:.2f} GB")
        return ", ".join(sizes)

    def look_at_ports(self) -> str:
        """Looks at what other machines can reach: nothing."""
        published = {
            service: self._containers.inspect(self._containers.of(service)[0])["HostConfig"][
                "PortBindings"
            ]
            for service in SERVICES
        }
        addresses = {
            f"{binding['HostIp']}:{binding['HostPort']}"
            for bindings in published["frontend"].values()
            for binding in bindings or ()
        }
        _expect(not any((published["engine"] or {}).values()), "a port of the engine is published")
        _expect(addresses == {GRPC, f"{LOOPBACK}:8000"}, f"published: {addresses}")
        return f"{' and '.join(sorted(addresses))}; of the engine nothing"

    def ask_from_outside(self) -> str:
        """Asks over gRPC and HTTP through the published ports."""
        return f"gRPC: {self._chat()!r}, HTTP: {_post(HTTP)!r}"

    def ask_from_the_client(self) -> str:
        """Asks over gRPC and HTTP from a container of the client service."""
        answer = self._chat()
        _expect(answer in self._client(), "the client has another answer over gRPC")
        over_http = self._client("--entrypoint", "python", code=POST)
        _expect(answer in over_http, f"the client has another answer over HTTP: {over_http}")
        return "gRPC and HTTP: the same"

    def look_inside(self) -> str:
        """Looks at what the services' processes may do."""
        for service in SERVICES:
            seen = json.loads(
                self._containers.execute(self._containers.of(service)[0], CONFINEMENT)
            )
            wanted = {"uid": 10001, "capabilities": 0, "no_new_privileges": 1, "writable": []}
            _expect(seen == wanted, f"{service}: {seen}")
        return "uid 10001, read-only root, no capabilities, no new privileges, in both"

    def kill_the_engine(self) -> str:
        """Kills the engine's process, and waits until the next engine has answered."""
        [container] = self._containers.of("engine")
        self._kill(container)
        started = time.monotonic()
        self._wait("an answer from the next engine", self._answers)
        return f"the next answer after {time.monotonic() - started:.0f} s"

    def scale(self) -> str:
        """Adds an engine, and stops the first one."""
        words = ("--scale", "engine=2")
        self._containers.up(*words, files=[BASE], services=SERVICES)
        self._wait("two engines in use", lambda: "engines 2/2 used" in self._octavo("health", GRPC))
        self._containers.stop(self._containers.of("engine")[0])
        answer = self._chat()
        self._containers.down([BASE])
        return f"both used; one stopped, the other answers {answer!r}"

    def add_tls(self) -> str:
        """Starts the stack with certificates and API keys."""
        certificates = self._certificates()
        files = [BASE, TLS]
        self._containers.environment["OCTAVO_CERTIFICATES"] = str(certificates)
        self._containers.up(files=files, services=SERVICES)
        answer = self._client(files=files)
        trusted = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        url = HTTP.replace("http", "https")
        over_http = _post(url, key=KEY, verify=trusted)
        refused = httpx.post(f"{url}/v1/chat/completions", json=BODY, verify=trusted).status_code
        _expect(over_http in answer, f"the client has another answer: {answer}")
        _expect(refused == httpx.codes.UNAUTHORIZED, f"without a key: {refused}")
        self._containers.down(files)
        return f"the client with gRPC, HTTPS from outside: the same answer; without a key {refused}"

    def add_observability(self) -> str:
        """Starts the stack with metrics and, where they can be pulled, what gathers them."""
        files = [BASE, OBSERVABILITY]
        is_whole = all(map(self._containers.can_pull, OTHERS))
        self._containers.up(files=files, services=SERVICES)
        for service in SERVICES:
            code = f"import urllib.request as r; print(r.urlopen('http://{service}:9100/metrics').read())"
            metrics = self._client("--entrypoint", "python", code=code, files=files)
            _expect("octavo_" in metrics, f"{service} has no metrics")
        if is_whole:
            self._containers.compose("up", "--detach", files=files)
            self._wait("Grafana", lambda: _is_ok(f"http://{LOOPBACK}:3000/api/health"))
        others = (
            "Prometheus, Grafana and Jaeger run" if is_whole else "no image of others to be had"
        )
        self._containers.down(files)
        return f"metrics of both services; {others}"

    def _client(self, *words: str, code: str | None = None, files: list[str] | None = None) -> str:
        command = ["--profile", "client", "run", "--rm", "--no-deps", "-T", *words, "client"]
        return self._containers.compose(
            *command, *([] if code is None else ["-c", code]), files=files or [BASE]
        )

    def _chat(self) -> str:
        flags = ("--frontend", GRPC, "--temperature", "0", "--max-tokens", "16")
        return self._octavo("chat", "What is 7 + 5?", *flags).strip().splitlines()[0]

    def _octavo(self, *words: str) -> str:
        command = [sys.executable, "-P", "-m", "services.client", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode:
            raise TrialError(f"octavo {' '.join(words)}: {done.stderr}")
        return done.stdout

    def _answers(self) -> bool:
        with contextlib.suppress(TrialError):
            return bool(self._chat())
        return False

    def _wait(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not is_there():
            if time.monotonic() > deadline:
                raise TrialError(f"{what}: not after {READY_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def _kill(self, container: str) -> None:
        """Kills a container's first process; the program's own kill would count as a stop."""
        try:
            os.kill(self._containers.inspect(container)["State"]["Pid"], signal.SIGKILL)
        except (PermissionError, ProcessLookupError):  # of another user, or in a virtual machine
            with contextlib.suppress(TrialError):
                code = "import os; os.kill(1, 15); os.kill(1, 15)"  # the second one does not wait
                self._containers.execute(container, code)

    def _certificates(self) -> Path:
        """Writes what the file for TLS asks for, readable by the images' user."""
        folder = self._folder / "certificates"
        folder.mkdir(mode=0o755)
        authority = Authority(folder)
        for name in SERVICES:
            authority.issue(name, LOOPBACK, name)
        (folder / "keys.toml").write_text(f'[keys.client]\nkey = "{KEY}"\n')
        (folder / "api-key").write_text(KEY)
        for path in folder.iterdir():
            path.chmod(0o644)
        return folder


def _post(url: str, *, key: str = "", verify: ssl.SSLContext | bool = True) -> str:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = f"{url}/v1/chat/completions"
    answer = httpx.post(url, json=BODY, headers=headers, verify=verify, timeout=60)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def _is_ok(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url).is_success
    return False


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise TrialError(message)


def main() -> int:
    """Runs the trial and prints its table; a failure is the last row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep-images", action="store_true", help="leave the images that it built")
    keeps_images = parser.parse_args().keep_images
    with tempfile.TemporaryDirectory(prefix="octavo-trial-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        try:
            containers = Containers(folder)
        except TrialError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        trial = Trial(containers, folder)
        trial.note("with", f"{containers.versions()}, {datetime.date.today()}")
        try:
            trial.run()
        except (TrialError, httpx.HTTPError) as error:
            trial.note("failed", str(error))
        try:
            left = containers.remove([BASE], keeps_images=keeps_images)
            _expect(not left, f"left over: {', '.join(left)}")
            trial.note("down", "nothing is left")
        except TrialError as error:
            trial.note("failed", str(error))
    print("| step | result |\n|---|---|")
    for row in trial.rows:
        print(f"| {' | '.join(row)} |")
    return int(any(step == "failed" for step, _ in trial.rows))


if __name__ == "__main__":
    sys.exit(main())
