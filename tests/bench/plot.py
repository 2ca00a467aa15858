"""Bars of benchmark results beside the peer and the floor, as SVG: `python -m tests.bench.plot`.

    python -m tests.bench.plot qwen3-8b.json --out docs/qwen3-8b.svg
    python -m tests.bench.plot before.json after.json --out change.svg

Takes files of tests.bench.offline; figures of one kind share a panel and a scale.
"""

import argparse
import json
from pathlib import Path

from tests.bench.peer import peer_figures
from tests.bench.svg import Picture

PEER, FLOOR = "peer", "floor"
COLOURS = ("#2563a8", "#4ba3c3", "#7a4fa3", "#3a8f5c")
FIXED_COLOURS = {PEER: "#d08a2e", FLOOR: "#b8b8b8"}
WIDTH, MARGIN, HEAD = 760, 20, 60
PANEL_WIDTH, PANEL_HEIGHT = 180, 190
BAR_WIDTH, BAR_HEIGHT = 22, 110
GROUP_WIDTH, GROUP_SPACE = 85, 16
"""Pixels."""

Bars = dict[str, float]
"""Heights by series."""


def panels(results: dict[str, dict]) -> dict[str, dict[str, Bars]]:
    """Returns panel title -> group -> bars.

    A figure's name is its kind, a comma and a name within its kind.

    Args:
        results: contents of result files by the names of their series, all of one shape.
    """
    found: dict[str, dict[str, Bars]] = {}
    first = next(iter(results.values()))
    peer = peer_figures(first["shape"], first["machine"]["gpu"])
    for series, content in results.items():
        for name, figure in content["figures"].items():
            kind, _, rest = name.partition(", ")
            groups = found.setdefault(f"{kind}, {figure['unit']}", {})
            bars = groups.setdefault(rest or kind, {})
            bars[series] = figure["median"]
            if name in peer:
                bars[PEER] = peer[name].peer
                if peer[name].floor is not None:
                    bars[FLOOR] = peer[name].floor
    return found


def draw(results: dict[str, dict]) -> Picture:
    """Draws the panels side by side, in as many rows as it takes."""
    found = panels(results)
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(results)} | FIXED_COLOURS
    used = {series for groups in found.values() for bars in groups.values() for series in bars}
    group_width = max(GROUP_WIDTH, len(used) * BAR_WIDTH + GROUP_SPACE)
    places: list[tuple[float, float]] = []
    x, y = float(MARGIN), float(HEAD)
    for groups in found.values():
        panel_width = max(PANEL_WIDTH, len(groups) * group_width)
        if x > MARGIN and x + panel_width > WIDTH:
            x, y = float(MARGIN), y + PANEL_HEIGHT
        places.append((x, y))
        x += panel_width
    first = next(iter(results.values()))
    title = f"{first['shape']} on {first['machine']['gpu'] or first['machine']['cpu']}"
    picture = Picture(WIDTH, y + PANEL_HEIGHT, title)
    picture.text(MARGIN, 22, title, size=15)
    picture.legend(MARGIN, 44, {name: colours[name] for name in colours if name in used})
    for place, (name, groups) in zip(places, found.items(), strict=True):
        _draw_panel(picture, place, name, groups, colours, group_width)
    return picture


def _draw_panel(
    picture: Picture,
    place: tuple[float, float],
    title: str,
    groups: dict[str, Bars],
    colours: dict[str, str],
    group_width: float,
) -> None:
    left, top = place
    largest = max(max(bars.values()) for bars in groups.values()) or 1.0
    base = top + 34 + BAR_HEIGHT
    picture.text(left, top + 14, title, size=13)
    for number, (group, bars) in enumerate(groups.items()):
        start = x = left + number * group_width
        for series, value in sorted(bars.items(), key=lambda item: list(colours).index(item[0])):
            height = BAR_HEIGHT * value / largest
            tip = f"{series}, {group}: {value:g}"
            picture.rect(x, base - height, BAR_WIDTH - 2, height, fill=colours[series], tip=tip)
            label = f"{value:.3g}"
            picture.text(x + BAR_WIDTH / 2 - 1, base - height - 3, label, anchor="middle", size=8)
            x += BAR_WIDTH
        picture.text((start + x) / 2, base + 15, group, anchor="middle", size=10)
    picture.line(left, base, left + len(groups) * group_width - GROUP_SPACE, base)


def main() -> None:
    """Draws and writes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="results, all of one shape")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    draw({path.stem: json.loads(path.read_text()) for path in arguments.results}).write(
        arguments.out
    )


if __name__ == "__main__":
    main()
