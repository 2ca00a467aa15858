"""The table of one profile: a layer's kernels, what is outside of layers, and sums by kernel."""

from collections.abc import Iterator, Sequence
from statistics import mean, median

from tests.bench.kernel_advances import Advance, Kernel, Period, find_period

MOST_OUTSIDE, MOST_KERNELS = 5, 10
"""Rows of the second and the third part."""


def kernel_table(steps: Sequence[Sequence[Advance]]) -> list[str]:
    """Returns the lines for steps that all ran the same kernels, at least one."""
    busy = median(sum(each.own for each in step) for step in steps)
    whole = median(sum(each.own + each.gap for each in step) for step in steps)
    lines = [
        f"{len(steps[0])} kernels in {whole:.0f} us, of which the device was busy {busy:.0f}; "
        f"{len(steps)} steps"
    ]
    period = find_period([each.kernel for each in steps[0]])
    if period is None:
        lines.append("no kernels repeat")
    else:
        lines += [*_layer_rows(steps, period), *_outside_rows(steps, period)]
    return [*lines, *_kernel_rows(steps)]


def layer_us(steps: Sequence[Sequence[Advance]]) -> list[float]:
    """Returns the time of a layer in each step, own times and gaps; nothing if none repeats."""
    period = find_period([each.kernel for each in steps[0]])
    if period is None:
        return []
    return [
        sum(each.own + each.gap for each in step[period.begin : period.end]) / period.repeats
        for step in steps
    ]


def _layer_rows(steps: Sequence[Sequence[Advance]], period: Period) -> Iterator[str]:
    """Yields a layer's kernels, medians over steps and layers.

    The first layer and the last are left out, as their neighbours are other kernels.
    """
    layers = range(1, period.repeats - 1) if period.repeats > 2 else range(period.repeats)
    yield f"a layer: {period.length} kernels, {period.repeats} times from kernel {period.begin}"
    yield f"{'':38} {'grid/threads':>16} {'duration':>8} {'own':>7} {'gap':>6}"
    sums = [0.0, 0.0, 0.0]
    for offset in range(period.begin, period.begin + period.length):
        found = [step[offset + layer * period.length] for step in steps for layer in layers]
        row = [
            median(getattr(each, field) for each in found) for field in ("duration", "own", "gap")
        ]
        sums = [total + value for total, value in zip(sums, row, strict=True)]
        yield f"{_names(found[0].kernel)} {row[0]:8.1f} {row[1]:7.1f} {row[2]:6.2f}"
    total = period.repeats * (sums[1] + sums[2])
    yield (
        f"{'layer':38} {'':16} {sums[0]:8.1f} {sums[1]:7.1f} {sums[2]:6.2f}"
        f"  x {period.repeats} = {total:.0f}"
    )


def _outside_rows(steps: Sequence[Sequence[Advance]], period: Period) -> Iterator[str]:
    indices = [*range(period.begin), *range(period.end, len(steps[0]))]
    rows = [
        (
            median(step[index].own for step in steps),
            median(step[index].gap for step in steps),
            index,
        )
        for index in indices
    ]
    yield (
        f"outside of layers: own {sum(row[0] for row in rows):.0f}, "
        f"gaps {sum(row[1] for row in rows):.0f}; the most"
    )
    for own, gap, index in sorted(rows, reverse=True)[:MOST_OUTSIDE]:
        yield f"{_names(steps[0][index].kernel)} {'':8} {own:7.1f} {gap:6.2f}  kernel {index}"


def _kernel_rows(steps: Sequence[Sequence[Advance]]) -> Iterator[str]:
    """Yields sums of a step by kernel, the largest first."""
    columns = f"{'each':>8} {'own':>7} {'sum':>7} {'n':>4}"
    yield f"{'by kernel, of a step':38} {'grid/threads':>16} {columns}"
    by_kernel: dict[Kernel, list[Advance]] = {}
    for step in steps:
        for each in step:
            by_kernel.setdefault(each.kernel, []).append(each)
    rows = sorted(by_kernel.items(), key=lambda row: sum(each.own for each in row[1]), reverse=True)
    for kernel, found in rows[:MOST_KERNELS]:
        own = sum(each.own for each in found) / len(steps)
        duration = mean(each.duration for each in found)
        count = len(found) // len(steps)
        yield f"{_names(kernel)} {duration:8.2f} {own:7.0f} {duration * count:7.0f} {count:4}"
    rest = [each for _, found in rows[MOST_KERNELS:] for each in found]
    if rest:
        own, total = (
            sum(getattr(each, field) for each in rest) / len(steps) for field in ("own", "duration")
        )
        yield f"{'the rest':38} {'':16} {'':8} {own:7.0f} {total:7.0f} {len(rest) // len(steps):4}"


def _names(kernel: Kernel) -> str:
    return f"{kernel.name:38} {kernel.launch:>16}"
