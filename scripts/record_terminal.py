#!/usr/bin/env python3
"""Runs commands in a terminal and draws what they print, in its time, as an animated SVG.

    scripts/record_terminal.py --out docs/terminal.svg

Each command is run as it is shown, and each line appears when it was printed; longer waits are cut
to --longest-wait-s, which the last line of the picture says. The commands start the stack with the
embedded model, ask it over gRPC and HTTP, and stop it.
"""

import argparse
import os
import pty
import re
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
PROMPT = "$ "
SERVE = "octavo serve --http-port 8000"
COMMANDS = (
    'octavo chat "What is 7 + 5?" --temperature 0',
    'octavo chat "Tell me a story about Mia and Tom." --temperature 0 --max-tokens 80',
    "curl localhost:8000/v1/chat/completions -s -H 'content-type: application/json' \\\n"
    '    -d \'{"model": "tiny", "messages": [{"role": "user", "content": "What is 8 + 9?"}]}\'',
)
READY = "watch it:"
COLUMNS, CHARACTER_WIDTH, LINE_HEIGHT, MARGIN = 100, 7.8, 18, 14
TYPING_S, PAUSE_S, END_S = 0.8, 1.0, 5.0
COLOURS = {"ground": "#14181f", "text": "#d8dee6", "command": "#7fc8ff", "note": "#8a94a3"}
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@dataclass
class Line:
    """A line of the picture; at_s: when it appears. kind: a key of COLOURS."""

    text: str
    at_s: float
    kind: str = "text"


class Terminal:
    """Runs commands in a pseudo-terminal and notes their lines."""

    def __init__(self, longest_wait_s: float) -> None:
        self.lines: list[Line] = []
        self._longest_wait_s = longest_wait_s
        self._picture_s = 0.0

    def show_command(self, command: str) -> None:
        """Notes a command as if it were typed."""
        self._picture_s += PAUSE_S
        self._note(PROMPT + command, "command")
        self._picture_s += TYPING_S

    def start(self, command: str, *, until: str | None = None) -> subprocess.Popen[bytes]:
        """Shows and starts a command, and notes what it prints until its end.

        With `until` the command goes on in the background after a line with that text.
        """
        self.show_command(command if until is None else f"{command} &")
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            f"exec {command}", shell=True, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
            env={**os.environ, "COLUMNS": str(COLUMNS), "TERM": "dumb"}, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._follow(ours, until)
        return process

    def _follow(self, terminal: int, until: str | None) -> None:
        rest, last_s = "", time.monotonic()
        while select.select([terminal], [], [], 120)[0]:
            try:
                piece = os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # the last program has closed it
                piece = ""
            now_s = time.monotonic()
            self._picture_s += min(now_s - last_s, self._longest_wait_s)
            last_s = now_s
            *whole, rest = (rest + _CONTROL.sub("", piece)).split("\n")
            for line in whole:
                self._note(line)
            if not piece or (until and any(until in line for line in whole)):
                break
        if rest:
            self._note(rest)

    def _note(self, text: str, kind: str = "text") -> None:
        for line in text.split("\n"):
            for start in range(0, max(len(line), 1), COLUMNS):
                self.lines.append(Line(line[start : start + COLUMNS], self._picture_s, kind))

    def note(self, text: str) -> None:
        """Adds a line of our own."""
        self._note(text, "note")


def draw(lines: list[Line]) -> str:
    """Returns the picture: every line appears at its time; all of them stay."""
    total_s = lines[-1].at_s + END_S
    width, height = COLUMNS * CHARACTER_WIDTH + 2 * MARGIN, len(lines) * LINE_HEIGHT + 2 * MARGIN
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' "
        f"width='{width:g}' height='{height:g}' role='img' font-size='13' "
        "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace'>",
        "<title>Octavo in a terminal</title>",
        f"<rect width='100%' height='100%' rx='8' fill='{COLOURS['ground']}'/>",
    ]
    for number, line in enumerate(lines):
        y = MARGIN + (number + 0.8) * LINE_HEIGHT
        share = min(line.at_s / total_s, 0.999)
        parts.append(
            f"<text x='{MARGIN}' y='{y:g}' fill='{COLOURS[line.kind]}' xml:space='preserve'>"
            f"{escape(line.text)}<animate attributeName='opacity' calcMode='discrete' "
            f"values='0;1' keyTimes='0;{share:.4f}' dur='{total_s:.2f}s'/></text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    """Records the commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--longest-wait-s", type=float, default=1.5)
    options = parser.parse_args()
    os.environ["PATH"] = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # Its own log would fill the picture.
    os.environ |= {"OCTAVO_ENGINE_LOG_LEVEL": "warning", "OCTAVO_FRONTEND_LOG_LEVEL": "warning"}
    terminal = Terminal(options.longest_wait_s)
    serve = terminal.start(SERVE, until=READY)
    try:
        for command in COMMANDS:
            finished = terminal.start(command)
            if finished.wait():
                sys.exit(f"{command} exited with {finished.returncode}")
    finally:
        serve.terminate()
        serve.wait()
    terminal.note(
        f"# embedded model of 1.38 million parameters on 2 CPU cores; waits of over "
        f"{options.longest_wait_s:g} s are cut"
    )
    options.out.write_text(draw(terminal.lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
