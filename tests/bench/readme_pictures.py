"""Draws README's two pictures from the tables of docs/benchmarks.md.

    python -m tests.bench.readme_pictures

Where the peer has several figures, its best one is drawn.
"""

import re
from pathlib import Path

from tests.bench.svg import Picture

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
OURS, PEER = "Octavo", "vLLM 0.26.0"
COLOURS = {OURS: "#2563a8", PEER: "#d08a2e"}
MODELS = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B")
BATCHES = (1, 8, 32, 128, 256)
WIDTH, BAR_WIDTH, BAR_HEIGHT, GROUP_WIDTH, PANEL_GAP, MARGIN = 860, 21, 120, 51, 22, 16
GAP, BASE_LINE = 5, 200
"""Pixels."""

Pair = tuple[float, float]
"""Our figure and the peer's."""


def decode_figures(text: str, model: str) -> dict[str, Pair]:
    """Returns milliseconds of a decode step by number of requests."""
    [table] = re.findall(rf"^\| {re.escape(model)}\b[^|]*\| Octavo.*?\n\n", text, re.DOTALL | re.M)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    columns = rows[0]
    found = {}
    for row in rows[2:]:
        if match := re.match(r"(?:decode )?batch (\d+)", row[0]):
            found[match[1]] = (_first(row[1]), _first(row[columns.index("vLLM")]))
    return found


def start_figures(text: str) -> dict[str, Pair]:
    """Returns seconds from the start of the process to the first token."""
    [empty, kept] = re.findall(
        r"^\| \[start\][^|]*nothing kept \|(.*)\|\n\| everything kept \|(.*)\|$", text, re.M
    )[0]
    figures = {"8B, caches empty": empty, "8B, caches kept": kept}
    return {name: _start_pair(row) for name, row in figures.items()}


def _start_pair(row: str) -> Pair:
    ours, peer, *_ = row.split("|")
    return _first(ours), _first(peer)


def draw_decode(text: str) -> Picture:
    """Draws the time of a decode step, a panel for each model."""
    picture = _open("Time of a decode step on one H200, ms: less is better")
    x = float(MARGIN)
    for model in MODELS:
        figures = decode_figures(text, model)
        assert [int(batch) for batch in figures] == list(BATCHES), model
        picture.text(x, 62, f"{model}, by number of requests", size=13)
        x = _bars(picture, x, figures, GROUP_WIDTH) + PANEL_GAP
    return picture


def draw_start(text: str) -> Picture:
    """Draws the time of a start."""
    picture = _open(
        "From the start of the process to the first token on one H200, s: less is better"
    )
    _bars(picture, MARGIN, start_figures(text), (WIDTH - 2 * MARGIN + GAP) / 4)
    return picture


def _open(title: str) -> Picture:
    picture = Picture(WIDTH, BASE_LINE + 28, title)
    picture.text(MARGIN, 22, title, size=15)
    picture.legend(MARGIN, 42, COLOURS)
    return picture


def _bars(picture: Picture, x: float, figures: dict[str, Pair], group_width: float) -> float:
    """Draws a group of bars for each entry, all to one scale; returns where they end."""
    most = max(max(pair) for pair in figures.values())
    start, margin = x, (group_width - GAP - 2 * BAR_WIDTH - 2) / 2
    for name, pair in figures.items():
        for number, (series, value) in enumerate(zip(COLOURS, pair, strict=True)):
            height, left = BAR_HEIGHT * value / most, x + margin + number * (BAR_WIDTH + 2)
            tip = f"{series}, {name}: {value:g}"
            picture.rect(left, BASE_LINE - height, BAR_WIDTH, height, fill=COLOURS[series], tip=tip)
            picture.text(
                left + BAR_WIDTH / 2, BASE_LINE - height - 3, _shown(value), anchor="middle", size=9
            )
        picture.text(x + margin + BAR_WIDTH + 1, BASE_LINE + 15, name, anchor="middle", size=11)
        x += group_width
    picture.line(start, BASE_LINE, x - GAP, BASE_LINE)
    return x


def _shown(value: float) -> str:
    """Returns a figure with three digits."""
    return f"{value:#.3g}".rstrip(".")


def _first(cell: str) -> float:
    return float(re.findall(r"[\d.]+", cell.replace(",", ""))[0])


def main() -> None:
    """Writes both pictures."""
    text = BENCHMARKS.read_text()
    draw_decode(text).write(ROOT / "docs" / "readme-decode.svg")
    draw_start(text).write(ROOT / "docs" / "readme-start.svg")


if __name__ == "__main__":
    main()
