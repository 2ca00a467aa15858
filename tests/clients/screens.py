"""Draws the screen of an agent that does the task, with tmux."""

import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from tests.clients.agents import AgentAt, AgentFailedError
from tests.support.scripted_model import DONE

COLUMNS, LINES = 96, 40
CHARACTER_WIDTH, LINE_HEIGHT, MARGIN = 7.8, 18, 14
GROUND, TEXT = "#14181f", "#d8dee6"
TIMEOUT_S = 120
SETTLING_S = 3


def draw_agent(agent: AgentAt, name: str, out: Path) -> None:
    """Has an agent do the task on its screen and draws the screen when it is done.

    Raises:
        AgentFailedError: it does not say that it is done; the message is its screen.
    """
    screen = _Screen(agent)
    try:
        lines = screen.wait_for(DONE)
    finally:
        screen.close()
    out.write_text(draw(lines, title=f"{name} with a model that Octavo serves"))


def draw(lines: Sequence[str], *, title: str) -> str:
    """Returns lines of a screen as an SVG picture."""
    width, height = COLUMNS * CHARACTER_WIDTH + 2 * MARGIN, len(lines) * LINE_HEIGHT + 2 * MARGIN
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' "
        f"width='{width:g}' height='{height:g}' role='img' font-size='13' "
        "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace'>",
        f"<title>{escape(title)}</title>",
        f"<rect width='100%' height='100%' rx='8' fill='{GROUND}'/>",
        *(
            f"<text x='{MARGIN}' y='{MARGIN + (number + 0.8) * LINE_HEIGHT:g}' fill='{TEXT}' "
            f"xml:space='preserve'>{escape(line)}</text>"
            for number, line in enumerate(lines)
            if line
        ),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Screen:
    """A terminal of tmux, with a server of its own, in which an agent runs."""

    def __init__(self, agent: AgentAt) -> None:
        self._socket = agent.home / "tmux"
        variables = [f"{name}={value}" for name, value in agent.environment.items()]
        command = shlex.join(["env", "-i", *variables, *agent.command("screen")])
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(agent.work), command)

    def wait_for(self, text: str) -> list[str]:
        """Returns the screen's lines once it shows a text and has settled."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if text in self._shown():
                time.sleep(SETTLING_S)
                return re.sub(r"\n{3,}", "\n\n", self._shown().strip("\n")).splitlines()
            time.sleep(0.5)
        raise AgentFailedError(f"not done in {TIMEOUT_S} s:\n{self._shown()}")

    def close(self) -> None:
        """Ends the agent and the terminal."""
        self._tmux("kill-server")

    def _shown(self) -> str:
        return self._tmux("capture-pane", "-p", "-S", "-")

    def _tmux(self, *arguments: str) -> str:
        result = subprocess.run(
            ["tmux", "-S", self._socket, *arguments], capture_output=True, text=True, check=False
        )
        return result.stdout
