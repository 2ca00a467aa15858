"""Memory growth of processes."""

import time

import numpy as np
import psutil


class MemorySlopes:
    """Samples the resident memory of processes by name; each restart begins a new curve."""

    def __init__(self) -> None:
        self._curves: dict[str, list[list[tuple[float, float]]]] = {}
        self._pids: dict[str, int] = {}

    def sample(self, pids: dict[str, int]) -> None:
        """Samples each process; one that has just ended is left out."""
        for name, pid in pids.items():
            try:
                rss_mb = psutil.Process(pid).memory_info().rss / 2**20
            except psutil.NoSuchProcess:
                continue
            curves = self._curves.setdefault(name, [])
            if self._pids.get(name) != pid:
                curves.append([])
                self._pids[name] = pid
            curves[-1].append((time.monotonic(), rss_mb))

    def mb_per_minute(self, *, after_s: float) -> dict[str, float]:
        """Returns the slope of each process's longest curve, without its first seconds."""
        slopes = {}
        for name, curves in self._curves.items():
            points = np.array(max(curves, key=lambda curve: curve[-1][0] - curve[0][0]))
            points = points[points[:, 0] >= points[0, 0] + after_s]
            if len(points) > 1:
                slopes[name] = round(float(np.polyfit(points[:, 0] / 60, points[:, 1], 1)[0]), 2)
        return slopes
