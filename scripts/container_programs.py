"""Runs containers with Docker or Podman, whichever this machine has."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "octavo-trial"
"""Name of the compose project, so that a stack of the user's is left alone."""
READY_TIMEOUT_S = 600.0
POLL_S = 0.5


class TrialError(Exception):
    """Something is not as it should be; the message says what."""


class Containers:
    """Runs containers of the compose files with the programs of this machine.

    Args:
        folder: an empty folder for copies of the compose files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = dict(os.environ)
        if _succeeds("docker", "info") and _succeeds("docker", "compose", "version"):
            self.program = "docker"
            self._compose = ["docker", "compose", "--project-directory", str(ROOT)]
            return
        self.program = "podman"
        self._compose = ["podman-compose", "--podman-build-args", "--network host"]
        # The default format has no health checks.
        self.environment["BUILDAH_FORMAT"] = "docker"
        for needed in ("podman", "podman-compose"):
            if shutil.which(needed) is None:
                raise TrialError(f"neither docker with its daemon and compose is here nor {needed}")

    def versions(self) -> str:
        """Returns the programs' names and versions."""
        first = self._run(self.program, "--version").split("\n")[0]
        compose = self._run(*self._compose[:2][: 2 if self.program == "docker" else 1], "version")
        return f"{first}, {compose.splitlines()[0]}"

    def compose(self, *words: str, files: Sequence[str]) -> str:
        """Runs a command of compose on some files and returns its output.

        Raises:
            TrialError: it fails.
        """
        return self._run(*self._compose_command(files), *words)

    def up(self, *words: str, files: Sequence[str], services: Sequence[str]) -> float:
        """Starts the services and returns the seconds until all of them are healthy."""
        started = time.monotonic()
        command = [*self._compose_command(files), "up", "--detach", *words, *services]
        with (self._folder / "up.log").open("w+") as log:
            process = subprocess.Popen(
                command, env=self.environment, cwd=ROOT, stdout=log, stderr=log
            )
            # It may wait for health, which nothing but `is_healthy` asks where there is no systemd.
            while process.poll() is None:
                self._are_healthy(services)
                time.sleep(POLL_S)
            log.seek(0)
            if process.returncode:
                raise TrialError(f"{' '.join(command)}:\n{log.read()}")
        while not self._are_healthy(services):
            if time.monotonic() - started > READY_TIMEOUT_S:
                raise TrialError(f"not healthy after {READY_TIMEOUT_S:.0f} s: {services}")
            time.sleep(POLL_S)
        return time.monotonic() - started

    def of(self, service: str) -> list[str]:
        """Returns the ids of a service's running containers."""
        label = f"label=com.docker.compose.service={service}"
        return self._run(self.program, "ps", "-q", "--filter", _OURS, "--filter", label).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """Returns all facts about a container."""
        facts: dict[str, Any] = json.loads(self._run(self.program, "inspect", container))[0]
        return facts

    def images(self) -> list[str]:
        """Returns the names of the images that the project has built."""
        words = ("--filter", f"reference={PROJECT}*", "--format", "{{.Repository}}")
        return sorted(set(self._run(self.program, "images", *words).split()) - {"<none>"})

    def image_bytes(self, container: str) -> int:
        """Returns the size of the image of a container."""
        image = self.inspect(container)["Image"]
        return int(self._run(self.program, "image", "inspect", "-f", "{{.Size}}", image))

    def execute(self, container: str, code: str) -> str:
        """Runs Python code in a container and returns its output."""
        return self._run(self.program, "exec", container, "python", "-c", code)

    def is_healthy(self, container: str) -> bool:
        """Whether a container's health check says that it serves."""
        if self.program == "podman":
            return _succeeds("podman", "healthcheck", "run", container)
        return bool(self.inspect(container)["State"]["Health"]["Status"] == "healthy")

    def stop(self, container: str) -> None:
        """Stops a container for good."""
        self._run(self.program, "stop", container)

    def down(self, files: Sequence[str]) -> None:
        """Removes containers, networks and volumes."""
        if self.program == "podman":  # podman-compose forgets containers of --scale
            ids = self._run("podman", "ps", "-aq", "--filter", _OURS).split()
            if ids:
                self._run("podman", "rm", "--force", "--depend", "--ignore", *ids)
        self.compose("down", "--volumes", "--remove-orphans", files=files)

    def remove(self, files: Sequence[str], *, keeps_images: bool) -> list[str]:
        """Removes what the project has, and returns what is still there."""
        self.down(files)
        if not keeps_images:
            for image in self.images():
                self._run(self.program, "image", "rm", "--force", image)
        kinds = (["ps", "--all"], ["volume", "ls"], ["network", "ls"])
        return [
            f"{kind[0]} {name}"
            for kind in kinds
            for name in self._run(self.program, *kind, "-q", "--filter", _OURS).split()
        ]

    def can_pull(self, image: str) -> bool:
        """Whether an image of others can be had here."""
        return _succeeds(self.program, "pull", "--quiet", image)

    def _are_healthy(self, services: Sequence[str]) -> bool:
        found = [self.of(service) for service in services]
        return all(found) and all(self.is_healthy(each) for ids in found for each in ids)

    def _compose_command(self, files: Sequence[str]) -> list[str]:
        paths = [ROOT / file if self.program == "docker" else self._copy(file) for file in files]
        named = [word for path in paths for word in ("--file", str(path))]
        return [*self._compose, "--project-name", PROJECT, *named]

    def _copy(self, file: str) -> Path:
        copy = self._folder / Path(file).name
        copy.write_text(portable((ROOT / file).read_text()))
        return copy

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise TrialError(f"{' '.join(command)}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return done.stdout


def portable(text: str) -> str:
    """Returns a compose file for podman-compose, which looks for paths from the file's own folder.

    Podman's health checks have no `start_interval`.
    """
    text = re.sub(r"^ *start_interval:.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<![\w./])\./", f"{ROOT}/", text)
    return re.sub(r"context: \.$", f"context: {ROOT}", text, flags=re.MULTILINE)


_OURS = f"label=com.docker.compose.project={PROJECT}"


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
