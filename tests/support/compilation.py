"""Compilation settings for tests of the worker."""

from typing import Any

from models.cudagraph_mode import CUDAGraphMode
from services.engine.config.compilation import CompilationConfig


def compilation_config(
    *, level: int = 0, cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE, **flags: Any
) -> CompilationConfig:
    """Returns the settings of a level and a graph mode, whatever the device."""
    mode = cudagraph_mode.name.lower()
    return CompilationConfig(compilation_level=level, cudagraph_mode=mode, **flags)
