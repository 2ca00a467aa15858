"""A small writer of SVG pictures; lengths are pixels."""

from pathlib import Path
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

FONT = "font-family='sans-serif' font-size='12'"


class Picture:
    """Rectangles, lines and words on a white ground, readable without any style sheet."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' "
            f"width='{width:g}' height='{height:g}' role='img' {FONT}>"
        )
        self._parts = [
            f"<title>{escape(title)}</title>",
            f"<rect width='{width:g}' height='{height:g}' fill='white'/>",
        ]

    def rect(
        self, x: float, y: float, width: float, height: float, *, fill: str, tip: str = ""
    ) -> None:
        """Draws a filled rectangle; `tip` is shown where the pointer rests on it."""
        inner = f"<title>{escape(tip)}</title>" if tip else ""
        self._parts.append(
            f"<rect x='{x:.2f}' y='{y:.2f}' width='{max(width, 0.2):.2f}' height='{height:.2f}' "
            f"fill={quoteattr(fill)}>{inner}</rect>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = "#999") -> None:
        """Draws a thin line."""
        self._parts.append(
            f"<line x1='{x1:.2f}' y1='{y1:.2f}' x2='{x2:.2f}' y2='{y2:.2f}' "
            f"stroke={quoteattr(stroke)} stroke-width='1'/>"
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: Literal["start", "middle", "end"] = "start",
        size: int = 12,
    ) -> None:
        """Writes words with their baseline at y."""
        self._parts.append(
            f"<text x='{x:.2f}' y='{y:.2f}' text-anchor='{anchor}' font-size='{size}'>"
            f"{escape(words)}</text>"
        )

    def legend(self, x: float, y: float, colours: dict[str, str]) -> None:
        """Explains colours, side by side."""
        for name, colour in colours.items():
            self.rect(x, y - 9, 10, 10, fill=colour)
            self.text(x + 14, y, name)
            x += 30 + 7 * len(name)

    def __str__(self) -> str:
        return "\n".join([self._head, *self._parts, "</svg>"]) + "\n"

    def write(self, path: Path) -> None:
        """Writes the picture to a file."""
        path.write_text(str(self))
