"""Writes tables of tiles into the file of a GPU, in models/kernels/tuning."""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from math import inf
from pathlib import Path

from models.kernels.tuning import registry

FOLDER = Path(registry.__file__).parent
TEMPLATE = '''"""Tables of {card}, compute capability {major}.{minor}; the others are generic."""

from dataclasses import replace
from math import inf

from models.kernels.tuning import generic, tiles

CAPABILITY = ({major}, {minor})

TABLES = replace(generic.TABLES)
'''


def path_of(capability: tuple[int, int]) -> Path:
    """Returns the file of a compute capability, which may not exist yet."""
    wanted = re.compile(rf"^CAPABILITY = \({capability[0]}, {capability[1]}\)$", re.MULTILINE)
    found = (each for each in sorted(FOLDER.glob("*.py")) if wanted.search(each.read_text()))
    return next(found, FOLDER / f"sm_{capability[0]}{capability[1]}.py")


def rendered(value: object, module: str = "") -> str:
    """Returns a table or tiles as Python: fields that differ from their defaults."""
    if is_dataclass(value):
        given = (
            f"{each.name}={rendered(getattr(value, each.name), module)}"
            for each in fields(value)
            if each.default is MISSING or getattr(value, each.name) != each.default
        )
        return f"{module}{type(value).__name__}({', '.join(given)})"
    if isinstance(value, Mapping):
        rows = (f"{key!r}: {rendered(each, module)}" for key, each in value.items())
        return f"{{{', '.join(rows)}}}"
    if isinstance(value, tuple):
        return f"({''.join(f'{rendered(each, module)}, ' for each in value)})"
    return "inf" if value == inf else repr(value)


def write_table(
    path: Path, capability: tuple[int, int], card: str, name: str, table: object, note: str
) -> None:
    """Writes a table into the file of a GPU, which is made where there is none.

    name: a field of Tables, or a constant of the file. note: the card, the day and the command.

    Raises:
        ValueError: the file is that of another capability.
    """
    major, minor = capability
    if not path.exists():
        path.write_text(TEMPLATE.format(card=card, major=major, minor=minor))
    source = path.read_text()
    if f"CAPABILITY = ({major}, {minor})" not in source:
        raise ValueError(f"{path} is not of compute capability {major}.{minor}")
    module = "tiles." if "import generic, tiles" in source else ""
    constant = name if name.isupper() else f"_{name.upper()}"
    source = _with_constant(source, constant, f"{constant} = {rendered(table, module)}", note)
    if not name.isupper():
        source = _with_field(source, name, constant)
    path.write_text(source)
    for command in (["check", "--quiet", "--fix", "--select", "F401,I"], ["format", "--quiet"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, str(path)], check=False)


def _with_constant(source: str, constant: str, assignment: str, note: str) -> str:
    """Returns the source with a constant, before TABLES if it is new."""
    lines, body = source.splitlines(), ast.parse(source).body
    places = {_target(each): each for each in body}
    old = places.get(constant)
    first = (old or places["TABLES"]).lineno - 1
    last = old.end_lineno if old else first
    if old and lines[first - 1].startswith("# ") and "tests.bench.tune" in lines[first - 1]:
        first -= 1
    lines[first:last] = [f"# {note}", assignment, *([] if old else [""])]
    return "\n".join(lines) + "\n"


def _with_field(source: str, name: str, constant: str) -> str:
    """Returns the source with TABLES that have a constant as a field."""
    call = next(each.value for each in ast.parse(source).body if _target(each) == "TABLES")
    given = next((each.value for each in call.keywords if each.arg == name), None)
    lines = source.splitlines()
    if given is None:
        row, column = call.end_lineno - 1, call.end_col_offset - 1
        before = lines[row][:column]
        comma = "" if before.rstrip().endswith((",", "(")) or not before.strip() else ", "
        lines[row] = f"{before}{comma}{name}={constant}{lines[row][column:]}"
    else:
        first, last = given.lineno - 1, given.end_lineno - 1
        text = lines[first][: given.col_offset] + constant + lines[last][given.end_col_offset :]
        lines[first : last + 1] = [text]
    return "\n".join(lines) + "\n"


def _target(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return None
