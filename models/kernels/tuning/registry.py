"""Finds the tables of a GPU: those of the file in this folder that has its compute capability."""

import importlib
import pkgutil
from functools import lru_cache

import torch

from models.kernels import gpu, tuning
from models.kernels.gpu import Gpu
from models.kernels.tuning import generic
from models.kernels.tuning.table import Tables

_tried: list[Tables] = []


def use_tables(tables: Tables | None) -> None:
    """Gives all GPUs of the process these tables, to time them; None: their own again.

    Callers of tables_on remember what they chose.
    """
    _tried[:] = [] if tables is None else [tables]


def tables_of(facts: Gpu) -> Tables:
    """Returns the tables of a GPU, the generic ones if none were measured on it."""
    if _tried:
        return _tried[0]
    return generic.TABLES if facts.is_generic else _measured().get(facts.capability, generic.TABLES)


@lru_cache
def tables_on(device: torch.device) -> Tables:
    """Returns the tables of a device, the generic ones for a CPU."""
    return tables_of(gpu.gpu_of(device)) if gpu.has_kernels(device) else generic.TABLES


def own_tables() -> Tables:
    """Returns the tables of the process's current GPU, the generic ones where it has none."""
    return tables_on(torch.device("cuda")) if torch.cuda.is_available() else generic.TABLES


@lru_cache
def _measured() -> dict[tuple[int, int], Tables]:
    modules = (
        importlib.import_module(f"{tuning.__name__}.{each.name}")
        for each in pkgutil.iter_modules(tuning.__path__)
    )
    return {each.CAPABILITY: each.TABLES for each in modules if hasattr(each, "CAPABILITY")}
