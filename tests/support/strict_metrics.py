"""Reads a page of metrics as strictly as Prometheus' own tools do.

Source of the rules: expfmt.TextParser and promlint of prometheus/client_golang, which are what
`promtool check metrics` runs; OpenMetrics is read by prometheus_client's own strict parser.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

TYPES = {"counter", "gauge", "histogram", "summary", "untyped"}
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
"""Snake case, which is stricter than the format."""
LABEL = re.compile(r"[a-z][a-z0-9_]*")
ABBREVIATED_UNITS = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "m", "h", "d"}
OTHER_UNITS = {
    "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days",
    "kilobytes", "megabytes", "gigabytes", "bits", "percent",
}  # fmt: skip
"""Units that have a base unit to be used instead."""
MAX_SERIES_PER_FAMILY = 64
"""More label values than this were not all chosen by us."""


@dataclass
class Family:
    """One metric family of the text format."""

    name: str
    help: str = ""
    type: str = ""
    samples: list[tuple[str, tuple[tuple[str, str], ...], float]] = field(default_factory=list)

    def has(self, sample_name: str) -> bool:
        """Whether a sample of this name belongs to it."""
        suffixes = ("_bucket", "_sum", "_count") if self.type == "histogram" else ("",)
        return any(sample_name == self.name + suffix for suffix in suffixes)


def check_page(text: str, content_type: str) -> set[str]:
    """Returns the names of a page's families, without `_total`; fails if a tool would complain."""
    if content_type.startswith("application/openmetrics-text"):
        names = [family.name for family in read_openmetrics(text)]
    else:
        assert content_type.startswith("text/plain; version=")
        families = parse(text)
        for family in families:
            lint(family)
        names = [family.name.removesuffix("_total") for family in families]
    assert len(names) == len(set(names))
    return set(names)


def parse(text: str) -> list[Family]:
    """Returns the families of a page in the text format, none of which may come in two pieces."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    last = Family("")
    for line in text.splitlines():
        if line.startswith("# "):
            _, kind, name, rest = line.split(" ", 3)
            assert kind in {"HELP", "TYPE"}, line
            if name != last.name:
                assert name not in families, f"{name} comes twice"
                last = families[name] = Family(name)
            assert not getattr(last, kind.lower()), f"second {kind} of {name}"
            assert not last.samples, f"{kind} of {name} after its samples"
            setattr(last, kind.lower(), rest)
        else:
            [[sample]] = [found.samples for found in read_text(line)]
            assert last.has(sample.name), f"{sample.name} is not a sample of {last.name}"
            assert sample.timestamp is None
            labels = tuple(sorted(sample.labels.items()))
            last.samples.append((sample.name, labels, sample.value))
    return list(families.values())


def lint(family: Family) -> None:
    """Fails if promlint complains of a family, or has a right to."""
    name, words = family.name, family.name.split("_")
    assert family.type in TYPES, f"{name} has the type {family.type!r}"
    assert family.help.strip(), f"{name} has no help"
    assert family.samples, f"{name} has no samples"
    assert NAME.fullmatch(name), name
    assert (family.type == "counter") == name.endswith("_total"), f"{name} is a {family.type}"
    assert not name.endswith(("_bucket", "_count", "_sum", "_info")), name
    assert not ABBREVIATED_UNITS & set(words), f"{name} abbreviates a unit"
    assert not OTHER_UNITS & set(words), f"{name} has not a base unit"
    assert not TYPES & set(words), f"{name} has a type in its name"
    series = [(sample, labels) for sample, labels, _ in family.samples]
    assert len(series) == len(set(series)), f"{name} has a series twice"
    assert len(series) <= MAX_SERIES_PER_FAMILY, f"{name} has {len(series)} series"
    reserved = {"le"} if family.type == "histogram" else set()
    for label in {label for _, labels in series for label, _ in labels}:
        assert LABEL.fullmatch(label), f"{name} has the label {label}"
        assert label in reserved or label not in {"le", "quantile"}, f"{name} has the label {label}"
    if family.type == "histogram":
        _check_histogram(name, family.samples)
    if family.type in {"counter", "histogram"}:
        assert all(value >= 0 for _, _, value in family.samples), name


def _check_histogram(
    name: str, samples: Iterable[tuple[str, tuple[tuple[str, str], ...], float]]
) -> None:
    buckets = [(dict(labels)["le"], value) for kind, labels, value in samples if "_bucket" in kind]
    bounds = [float(bound) for bound, _ in buckets]
    counts = [value for _, value in buckets]
    [count] = [value for kind, _, value in samples if kind == f"{name}_count"]
    assert bounds == sorted(set(bounds)), name
    assert bounds[-1] == float("inf"), name
    assert counts == sorted(counts), name
    assert counts[-1] == count, name
