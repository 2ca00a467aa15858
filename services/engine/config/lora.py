"""Low-rank adapters of the model."""

import re
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from services.engine.config.section import ConfigSection

DEFAULT_SLOTS = 4
"""Value of --max-loras where adapters are wanted and it is not given."""
ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@:-]{0,127}")


class LoraConfig(ConfigSection):
    """Low-rank adapters (LoRA) of the model, in PEFT's format."""

    lora: list[str] = Field(default=[])
    """Adapters to load before serving, each NAME=PATH: a folder, or OWNER/NAME[@REVISION] on the
    hub. Requests name them as their model."""
    lora_folder: Path | None = None
    """Folder under which adapters may be loaded while serving; without it none may."""
    max_loras: int = Field(default=0, ge=0, le=256)
    """Adapters that requests of one step may use, each with room in the device's memory; 0: none,
    or 4 with --lora or --lora-folder."""
    max_lora_rank: int = Field(default=16, ge=1, le=256)
    """Largest rank of an adapter; room is made for it."""
    lora_embeddings: bool = False
    """Make room for adapters of the embedding and the head, too."""
    lora_experts: bool = False
    """Make room for adapters of routed experts, too: each slot has room in all experts."""
    max_cpu_loras: int = Field(default=1024, ge=1, le=65_536)
    """Most adapters that are known at the same time; all are in host memory."""

    @model_validator(mode="before")
    @classmethod
    def _choose_slots(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("max_loras"):
            return values
        wants_some = values.get("lora") or values.get("lora_folder") is not None
        return {**values, "max_loras": DEFAULT_SLOTS} if wants_some else values

    @model_validator(mode="after")
    def _check_adapters(self) -> Self:
        names = [name for name, _ in self.start_adapters]
        for name in names:
            if ADAPTER_NAME.fullmatch(name) is None:
                raise ValueError(
                    f"--lora names {name[:130]!r}: a name has 1 to 128 letters, digits and"
                    " . _ - / @ :"
                )
        if len(set(names)) < len(names):
            raise ValueError("--lora gives two adapters the same name")
        if len(names) > self.max_cpu_loras:
            raise ValueError(
                f"--lora has {len(names)} adapters; --max-cpu-loras is {self.max_cpu_loras}"
            )
        return self

    @property
    def start_adapters(self) -> list[tuple[str, str]]:
        """Name and path of each adapter to load before serving."""
        adapters = []
        for each in self.lora:
            name, separator, path = each.partition("=")
            if not separator or not path:
                raise ValueError(f"--lora is {each[:200]!r}: it must be NAME=PATH")
            adapters.append((name, path))
        return adapters
