"""Makes the environment of each client, once."""

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ENVIRONMENTS = ROOT / ".cache" / "clients"
PACKAGES: dict[str, list[str]] = {
    name: entry["packages"]
    for name, entry in tomllib.loads((FOLDER / "packages.toml").read_text()).items()
}
INSTALL_TIMEOUT_S = 1200
_STAMP = "installed"


class NotInstallableError(Exception):
    """A client's packages cannot be installed here; the message is pip's last line."""


def python_of(client: str) -> Path:
    """Returns the interpreter that has a client, which is installed first if it is not.

    Raises:
        NotInstallableError: pip fails.
    """
    folder = ENVIRONMENTS / client
    python, stamp = folder / "bin" / "python", folder / _STAMP
    wanted = "\n".join([sys.version, *PACKAGES[client]])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    venv.create(folder, clear=True, with_pip=True)
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *PACKAGES[client]]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotInstallableError(f"pip took over {INSTALL_TIMEOUT_S} s") from None
    if result.returncode:
        raise NotInstallableError(result.stderr.strip().rpartition("\n")[2])
    stamp.write_text(wanted)
    return python
