"""Two results of benchmarks side by side."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

WORKLOAD_SETTINGS = ("divide_by",)
"""Settings of a program that change what it measures; others change how it is served."""


class ResultFileError(ValueError):
    """A file holds no result of a benchmark; the message says which and why."""


class UnlikeLoadsError(ValueError):
    """Two results are of different loads; the message says how they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure, all its repeats."""

    values: tuple[float, ...]
    unit: str
    better: str
    """lower or higher"""

    @property
    def median(self) -> float:
        """The middle of the repeats."""
        return median(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Measurements of one run, and their conditions by name, such as "gpu" or "torch".

    load: what was measured; ratios of other loads mean nothing. about: commit, settings and target.
    """

    figures: dict[str, Figure]
    load: dict[str, str]
    machine: dict[str, str]
    versions: dict[str, str]
    about: dict[str, str]


def read_result(path: Path) -> Result:
    """Reads what a benchmark wrote: tests.bench's programs, or `octavo bench serving --json`.

    Raises:
        ResultFileError: the file cannot be read or is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultFileError(f"{path} cannot be read: {error}") from error
    try:
        if "figures" in content:
            return _of_program(content)
        return _of_load(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ResultFileError(f"{path} is not a benchmark's result") from error


def check_loads(first: Result, second: Result) -> None:
    """Checks that two results are of the same load.

    Raises:
        UnlikeLoadsError: they are not.
    """
    if differences := list(_differences(first.load, second.load)):
        raise UnlikeLoadsError(f"the loads differ: {'; '.join(differences)}")


def comparison(first: Result, second: Result) -> Iterator[str]:
    """Yields lines: what differs in conditions, then second over first for every common figure.

    A figure is the same where the ranges of its repeats overlap. One repeat each shows no spread,
    so only the ratio is reported.
    """
    conditions = [
        *_differences(first.machine, second.machine),
        *_differences(first.versions, second.versions),
    ]
    yield from conditions
    if conditions:
        yield "machine or versions differ: the ratios tell of that, too"
    if loads := list(_differences(first.load, second.load)):
        yield from loads
        yield "the loads differ: the ratios tell of that, too"
    yield from _differences(first.about, second.about)
    common = [name for name in first.figures if name in second.figures]
    if common:
        width = max(len(name) for name in common)
        yield f"{'':{width}}  {'first':>18}  {'second':>18}  {'ratio':>6}"
        for name in common:
            yield f"{name:{width}}  {_row(first.figures[name], second.figures[name])}"
    for place, one, other in (("first", first, second), ("second", second, first)):
        lonely = [name for name in one.figures if name not in other.figures]
        if lonely:
            yield f"only in the {place}: {'; '.join(lonely)}"


def _of_program(content: Mapping[str, Any]) -> Result:
    figures = {
        name: Figure(
            values=tuple(float(value) for value in figure["values"]),
            unit=figure["unit"],
            better=figure["better"],
        )
        for name, figure in content["figures"].items()
        if figure["values"]
    }
    settings = dict(content["settings"])
    load = {name: settings.pop(name) for name in WORKLOAD_SETTINGS if name in settings}
    about = {f"setting {name}": value for name, value in settings.items()}
    return Result(
        figures=figures,
        load=_words({name: content[name] for name in ("benchmark", "shape")} | load),
        machine=_words(content["machine"]),
        versions=_words(content["versions"]),
        about=_words({"commit": content["commit"]} | about),
    )


def _of_load(content: Mapping[str, Any]) -> Result:
    """Reads a result of services.client.bench.report."""
    figures = {}
    for name, unit in (("requests_per_s", "requests/s"), ("output_tokens_per_s", "tokens/s")):
        figures[name] = Figure(values=(float(content[name]),), unit=unit, better="higher")
    for name in ("ttft_ms", "inter_token_ms", "e2e_ms"):
        for statistic, value in content[name].items():
            if value is not None:
                figures[f"{name} {statistic}"] = Figure(
                    values=(float(value),), unit="ms", better="lower"
                )
    load = {f"load {name}": value for name, value in content["load"].items()}
    # The address does not matter; whether the frontend took part does.
    target = content["target"].partition(" ")[0]
    about = {"target": target, "failed requests": sum(content["num_failed"].values())}
    return Result(
        figures=figures,
        load=_words({"benchmark": "bench serving"} | load),
        machine={},
        versions={},
        about=_words(about),
    )


def _words(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else str(value) for name, value in values.items()}


def _differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(name, "-"), theirs.get(name, "-")
        if one != other:
            yield f"{name}: {one} -> {other}"


def _cell(figure: Figure) -> str:
    """Returns a median with its spread: half the range, in percent of the median."""
    middle = figure.median
    if len(figure.values) == 1 or not middle:
        return f"{middle:.4g}"
    half_range = (max(figure.values) - min(figure.values)) / 2
    return f"{middle:.4g} +-{100 * half_range / abs(middle):.1f}%"


def _row(ours: Figure, theirs: Figure) -> str:
    cells = f"{_cell(ours):>18}  {_cell(theirs):>18}  {_ratio(ours, theirs):>6}"
    return f"{cells}  {ours.unit}, {_verdict(ours, theirs)}"


def _ratio(ours: Figure, theirs: Figure) -> str:
    return f"{theirs.median / ours.median:.3f}" if ours.median else "-"


def _verdict(ours: Figure, theirs: Figure) -> str:
    if len(ours.values) == 1 and len(theirs.values) == 1:
        return f"{ours.better} is better, one run each"
    if max(min(ours.values), min(theirs.values)) <= min(max(ours.values), max(theirs.values)):
        return "same within the spread"
    has_risen = theirs.median > ours.median
    return "better" if has_risen == (ours.better == "higher") else "worse"
