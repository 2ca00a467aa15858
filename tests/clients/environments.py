"""Makes the environment of each client, once."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients.trial import Report

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ENVIRONMENTS = ROOT / ".cache" / "clients"
CLIENTS: dict[str, Any] = tomllib.loads((FOLDER / "packages.toml").read_text())
INSTALL_TIMEOUT_S = 1200
DRIVER_TIMEOUT_S = 600
_STAMP = "installed"


class NotInstallableError(Exception):
    """A client's packages cannot be installed here; the message is the last line that says why."""


class DriverFailedError(Exception):
    """A driver exits with an error; the message is what it prints."""


@dataclass(frozen=True, slots=True)
class Driver:
    """How the driver of a client is started."""

    command: Sequence[str | Path]
    """The command, without the server's URL and the model's name."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def report(self, url: str, model: str, home: Path, **variables: str) -> Report:
        """Runs the driver and returns its report.

        Raises:
            DriverFailedError: it exits with an error; the message is what it prints.
        """
        base = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), **variables}
        result = subprocess.run(
            [*self.command, f"{url}/v1", model],
            cwd=ROOT,
            env=base | dict(self.environment),
            capture_output=True,
            text=True,
            timeout=DRIVER_TIMEOUT_S,
            check=False,
        )
        if result.returncode:
            raise DriverFailedError(result.stdout + result.stderr)
        return Report(**json.loads(result.stdout.strip().rpartition("\n")[2]))


def driver_of(client: str, *, newest: bool = False) -> Driver:
    """Returns the driver of a client, which is installed first if it is not.

    Args:
        client: a section of packages.toml.
        newest: takes the newest releases in place of the pinned ones.

    Raises:
        NotInstallableError: pip or npm fails, or there is no Node.
    """
    folder = ENVIRONMENTS / (f"{client}-newest" if newest else client)
    if "npm" in CLIENTS[client]:
        packages = CLIENTS[client]["npm"]
        if newest:
            packages = [_newest_of_npm(each.rpartition("@")[0]) for each in packages]
        modules = _installed_by_npm(folder, packages)
        program = FOLDER / "drivers" / f"{client}.cjs"
        return Driver(["node", program], {"NODE_PATH": str(modules)})
    packages = CLIENTS[client]["packages"]
    if newest:
        packages = [_newest_of_pip(each) if "==" in each else each for each in packages]
    python = _installed_by_pip(folder, packages)
    return Driver([python, "-m", f"tests.clients.drivers.{client}"])


def _newest_of_npm(package: str) -> str:
    return f"{package}@{_run(['npm', 'view', package, 'version'])}"


def _newest_of_pip(requirement: str) -> str:
    package = requirement.partition("==")[0]
    name = package.partition("[")[0]
    listed = _run([sys.executable, "-m", "pip", "index", "versions", name])
    return f"{package}=={listed.partition('(')[2].partition(')')[0]}"


@dataclass(frozen=True, slots=True)
class Program:
    """An installed program."""

    path: Path
    version: str


def newest_program(name: str, settings: Mapping[str, Any], *, installs: bool = True) -> Program:
    """Returns a program in its newest release, which is installed first if it is not.

    Args:
        name: its folder's name.
        settings: `program`, and its package of `npm` or of pip (`packages`).
        installs: False takes what is installed.

    Raises:
        NotInstallableError: pip or npm fails, or there is no Node.
    """
    folder = ENVIRONMENTS / name
    if not installs:
        stamp = folder / _STAMP
        if not stamp.is_file():
            raise NotInstallableError("it was not installed before")
        version = stamp.read_text().rpartition("\n")[2]
    elif "npm" in settings:
        version = _newest_of_npm(settings["npm"])
        _installed_by_npm(folder, [version])
    else:
        version = _newest_of_pip(settings["packages"])
        _installed_by_pip(folder, [version])
    programs = folder / ("node_modules/.bin" if "npm" in settings else "bin")
    return Program(programs / settings["program"], re.split("@|==", version)[-1])


def _installed_by_pip(folder: Path, packages: Sequence[str]) -> Path:
    """Returns the interpreter that has the packages."""
    python = folder / "bin" / "python"
    # Its programs have the folder in their first line: one that was moved is made again.
    wanted = "\n".join([sys.version, str(folder), *packages])
    if not _is_stamped(folder, wanted):
        venv.create(folder, clear=True, with_pip=True)
        _run([python, "-m", "pip", "install", "--disable-pip-version-check", *packages])
        (folder / _STAMP).write_text(wanted)
    return python


def _installed_by_npm(folder: Path, packages: Sequence[str]) -> Path:
    """Returns the folder of modules that has the packages."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise NotInstallableError("there is no Node, or no npm")
    wanted = "\n".join(packages)
    if not _is_stamped(folder, wanted):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _run(["npm", "install", "--prefix", folder, "--no-fund", "--no-audit", *packages])
        (folder / _STAMP).write_text(wanted)
    return folder / "node_modules"


def _is_stamped(folder: Path, wanted: str) -> bool:
    stamp = folder / _STAMP
    return stamp.is_file() and stamp.read_text() == wanted


def _run(command: Sequence[str | Path]) -> str:
    """Returns what an installer prints; raises NotInstallableError if it fails."""
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
            env=os.environ,
        )
    except subprocess.TimeoutExpired:
        raise NotInstallableError(f"it took over {INSTALL_TIMEOUT_S} s") from None
    if result.returncode:
        raise NotInstallableError(result.stderr.strip().rpartition("\n")[2])
    return result.stdout.strip()
