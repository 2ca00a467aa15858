"""The peer's figures and the hardware's floors, as far as they were measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

PEER_FILE = Path(__file__).parent / "peer_figures.json"


@dataclass(frozen=True, slots=True)
class PeerFigure:
    """One figure of the peer, the middle of its runs, and the least that the hardware allows."""

    peer: float
    floor: float | None


def peer_figures(shape: str, gpu: str | None) -> dict[str, PeerFigure]:
    """Returns the figures of a shape by name; none for a machine other than the measured one."""
    known = json.loads(PEER_FILE.read_text())
    if gpu != known["gpu"]:
        return {}
    return {
        name: PeerFigure(_middle(entry["peer"]), entry.get("floor"))
        for name, entry in known["shapes"].get(shape, {}).items()
    }


def _middle(value: float | list[float]) -> float:
    return mean(value) if isinstance(value, list) else value
