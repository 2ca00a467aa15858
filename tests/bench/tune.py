"""Times the tiles of a table on this GPU, and writes the fastest into the GPU's file.

    python -m tests.bench.tune TABLE [TABLE ...] [--gpu-file models/kernels/tuning/NAME.py]

TABLE is one of tests/bench/tuned_tables.py. Each row of it has sizes that represent it; tiles are
compared by the geometric mean of their microseconds over these. A row changes where other tiles
take at least 1 % less. Times are kept in NAME.tune.json after each measurement, so the same command
goes on where it was interrupted. docs/tuning.md has the whole course.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import cache, partial
from math import inf
from pathlib import Path
from statistics import geometric_mean

import torch
from triton.runtime.errors import OutOfResources

from models.kernels.gpu import Gpu, gpu_of
from models.kernels.tuning import hopper, registry
from models.kernels.tuning.table import Tables, look_up
from tests.bench.kernels import microseconds
from tests.bench.table_file import path_of, rendered, write_table
from tests.bench.tuned_tables import TUNED, Calls, Tuned
from tests.support.gpu_facts import forget_choices

LEAST_GAIN = 0.01
FIELDS = {each.name for each in fields(Tables)}

Timer = Callable[[Calls], float]
"""Returns the microseconds of one of the calls, which do the same on other memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A tuned row: its key, the tiles it had and has, and their microseconds."""

    key: object
    old: object
    new: object
    old_us: float
    new_us: float


class Times:
    """Microseconds by table, key, tiles and size, kept in a file.

    Raises:
        ValueError: the file has the times of another card.
    """

    def __init__(self, path: Path, card: str) -> None:
        self._path = path
        self._kept = {"card": card, "us": {}}
        if path.exists():
            self._kept = json.loads(path.read_text())
        if self._kept["card"] != card:
            raise ValueError(f"{path} has times of {self._kept['card']}, this GPU is {card}")

    def of(self, name: str, measure: Callable[[], float]) -> float:
        """Returns a time that was kept, or measures and keeps it; inf where tiles do not fit."""
        us = self._kept["us"]
        if name not in us:
            us[name] = measure()
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps(self._kept, indent=1))
            draft.replace(self._path)
        return us[name]


def current(name: str, gpu: Gpu) -> object:
    """Returns the table that the GPU has now, a field of Tables or a constant of hopper."""
    return getattr(registry.tables_of(gpu) if name in FIELDS else hopper, name)


@contextmanager
def trying(name: str, table: object, gpu: Gpu) -> Iterator[None]:
    """Has kernels choose from another table, for the length of the block."""
    before = getattr(hopper, name, None)
    if name in FIELDS:
        registry.use_tables(replace(registry.tables_of(gpu), **{name: table}))
    else:
        setattr(hopper, name, table)
    forget_choices()
    try:
        yield
    finally:
        if name in FIELDS:
            registry.use_tables(None)
        else:
            setattr(hopper, name, before)
        forget_choices()


def tune(tuned: Tuned, gpu: Gpu, timer: Timer, times: Times) -> list[Row]:
    """Returns the rows of a table with the fastest tiles."""
    table = current(tuned.name, gpu)
    rows = []
    for key, sizes in tuned.points.items():
        old = table[key] if isinstance(table, Mapping) else look_up(table, *key)
        us = {tiles: [] for tiles in (old, *tuned.candidates(key, old))}
        for size in sizes:
            calls = cache(partial(tuned.calls, key, size))
            for tiles, found in us.items():
                trial = {**table, key: tiles} if isinstance(table, Mapping) else _only(key, tiles)
                with trying(tuned.name, trial, gpu):
                    name = f"{tuned.name} {key} {size} {rendered(tiles)}"
                    found.append(times.of(name, lambda calls=calls: _time(calls, timer)))
        mean = {tiles: geometric_mean(found) for tiles, found in us.items()}
        best = min(mean, key=mean.__getitem__)
        new = best if mean[best] < (1 - LEAST_GAIN) * mean[old] else old
        rows.append(Row(key=key, old=old, new=new, old_us=mean[old], new_us=mean[new]))
    return rows


def _only(key: Sequence[float], tiles: object) -> tuple[object, ...]:
    return (((inf,) * len(key), tiles),)


def _time(calls: Callable[[], Calls], timer: Timer) -> float:
    try:
        return timer(calls())
    except OutOfResources:
        return inf


def table_of(rows: Sequence[Row], table: object) -> object:
    """Returns the table with its new rows."""
    if isinstance(table, Mapping):
        return {**table, **{row.key: row.new for row in rows}}
    return tuple((row.key, row.new) for row in rows)


def report(name: str, rows: Sequence[Row]) -> str:
    """Returns a table of old and new microseconds."""
    lines = [f"{name:24} {'old us':>10} {'new us':>10}"]
    for row in rows:
        tiles = "as before" if row.new == row.old else rendered(row.new)
        lines.append(f"{row.key!s:24} {row.old_us:10.2f} {row.new_us:10.2f}  {tiles}")
    return "\n".join(lines)


def run(names: Sequence[str], path: Path, card: str, gpu: Gpu, timer: Timer) -> None:
    """Tunes tables and writes the ones that changed."""
    times = Times(path.with_suffix(".tune.json"), card)
    for name in names:
        rows = tune(TUNED[name], gpu, timer, times)
        print(report(name, rows), flush=True)
        if any(row.new != row.old for row in rows):
            note = f"{card}, {datetime.now(UTC):%Y-%m-%d}, `python -m tests.bench.tune {name}`."
            table = table_of(rows, current(name, gpu))
            write_table(path, gpu.capability, card, name, table, note)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", choices=TUNED, metavar="TABLE")
    parser.add_argument("--gpu-file", type=Path)
    arguments = parser.parse_args()
    gpu, card = gpu_of(torch.device("cuda")), torch.cuda.get_device_name()
    path = arguments.gpu_file or path_of(gpu.capability)
    run(arguments.tables, path, card, gpu, microseconds)


if __name__ == "__main__":
    main()
