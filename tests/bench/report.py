"""The JSON that benchmarks write, and the table that they print.

{"benchmark", "started_at", "command", "machine", "versions", "commit", "settings",
 "figures": {name: {"unit", "better", "values", "median", "min", "max"}}, "facts", "problems"};
`octavo bench compare` reads it. It is written after every figure, so that a run that is cut short
leaves what it has measured.
"""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Literal

from tests.bench.machine import commit, machine, versions
from tests.bench.peer import peer_figures


class Report:
    """One run of one benchmark."""

    def __init__(
        self,
        benchmark: str,
        *,
        path: Path | None,
        shape: str = "",
        settings: dict[str, object] | None = None,
        commit_name: str = "",
    ) -> None:
        self.content: dict = {
            "benchmark": benchmark,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
            "machine": machine(),
            "versions": versions(),
            "commit": commit_name or commit(),
            "shape": shape,
            "settings": settings or {},
            "figures": {},
            "facts": {},
            "problems": [],
        }
        self._path = path
        self._peer = peer_figures(shape, self.content["machine"]["gpu"])
        self._started_s = time.monotonic()

    @property
    def figures(self) -> dict[str, dict]:
        """Returns the measurements so far, by name."""
        return self.content["figures"]

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started_s

    def add(
        self,
        name: str,
        values: Sequence[float],
        unit: str,
        better: Literal["lower", "higher"] = "lower",
        *,
        floor: float | None = None,
        is_shown: bool = True,
    ) -> None:
        """Takes all repeats of one figure, at least one, and shows it as progress.

        floor: the least that the hardware allows, where it is known.
        """
        self.figures[name] = summary(values) | {"unit": unit, "better": better}
        if floor is not None:
            self.figures[name]["floor"] = round(floor, 6)
        if is_shown:
            self.note(f"{name}: {self.figures[name]['median']:.4g} {unit}")
        self.save()

    def state(self, name: str, value: object) -> None:
        """Takes something that has no better or worse, or no repeats."""
        self.content["facts"][name] = value
        self.save()

    def problem(self, what: str) -> None:
        """Takes something that was not measured, and why."""
        self.content["problems"].append(what)
        self.note(_ends_of(what))
        self.save()

    def note(self, line: str) -> None:
        """Shows progress."""
        print(f"[{self.elapsed_s:6.1f} s] {line}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Writes the file whole, or leaves the one before."""
        if self._path is None:
            return
        unfinished = self._path.with_name(self._path.name + ".part")
        unfinished.write_text(json.dumps(self.content, indent=1) + "\n")
        unfinished.replace(self._path)

    def table(self) -> str:
        """Returns all figures, one line each, with the peer's and the floor where known."""
        lines = [f"{'':34} {'median':>10} {'min':>10} {'max':>10} {'unit':9} {'/peer':>6} /floor"]
        for name, figure in self.figures.items():
            numbers = " ".join(f"{figure[key]:10.4g}" for key in ("median", "min", "max"))
            known = self._peer.get(name)
            peer = f"{figure['median'] / known.peer:.2f}" if known else "-"
            least = figure.get("floor") or (known.floor if known else None)
            floor = f"{figure['median'] / least:.2f}" if least else "-"
            lines.append(f"{name:34} {numbers} {figure['unit']:9} {peer:>6} {floor:>6}")
        if self.content["settings"].get("divide_by", 1) != 1:
            lines.append("a rehearsal: lengths are divided, names of figures tell the full ones")
        lines += [f"not measured: {_ends_of(problem)}" for problem in self.content["problems"]]
        return "\n".join(lines)


def _ends_of(text: str) -> str:
    """Returns the first line and the last, which for what a service wrote is why it ended."""
    first, *others = text.splitlines()
    return f"{first}: {others[-1]}" if others else first


def summary(values: Sequence[float]) -> dict[str, object]:
    """Returns the values with their median, least and largest."""
    return {
        "values": [round(value, 6) for value in values],
        "median": round(median(values), 6),
        "min": round(min(values), 6),
        "max": round(max(values), 6),
    }
