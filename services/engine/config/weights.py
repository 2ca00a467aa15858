"""Weights that change while the engine serves, and which ones it starts with."""

import re
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from services.engine.config.section import ConfigSection

WEIGHTS_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@:+-]{0,127}")


class WeightsConfig(ConfigSection):
    """Other weights of the model's form, as reinforcement learning makes them."""

    weights_folder: Path | None = None
    """Folder under which checkpoints may be loaded while serving, and where weights that a caller
    sends are kept until others replace them; without it weights do not change."""
    apply_weights: list[Path] = Field(default=[])
    """Checkpoints that are loaded over the model's own weights at the start, in this order; each
    may be a part of one."""
    weights_version: str = ""
    """Name in answers of the weights that the engine starts with; absent if empty."""

    @model_validator(mode="after")
    def _check_version(self) -> Self:
        if self.weights_version and WEIGHTS_VERSION.fullmatch(self.weights_version) is None:
            raise ValueError(
                f"--weights-version is {self.weights_version[:130]!r}: it has 1 to 128 letters,"
                " digits and . _ - / @ : +"
            )
        return self
