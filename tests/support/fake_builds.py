"""Fake builds of kernels that a test can observe."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Noted:
    """Leaves a file with the number and the niceness of the process that built it."""

    path: Path

    def build(self) -> None:
        self.path.write_text(f"{os.getpid()} {os.nice(0)}")


@dataclass(frozen=True)
class Failing:
    """Cannot be built."""

    def build(self) -> None:
        raise ValueError("two dtypes in one branch")


@dataclass(frozen=True)
class Deadly:
    """Ends the process that builds it."""

    def build(self) -> None:
        os._exit(1)
