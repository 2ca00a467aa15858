"""Caches of compiled code that hold nothing yet, for cold starts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")


@contextmanager
def empty_caches() -> Iterator[Path]:
    """Gives workers empty folders for their caches; yields a folder for our own compile cache."""
    before = {name: os.environ.get(name) for name in CACHE_VARIABLES}
    with TemporaryDirectory(prefix="octavo-caches-") as folder:
        for name in CACHE_VARIABLES:
            os.environ[name] = str(Path(folder) / name.lower())
        try:
            yield Path(folder) / "compile"
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
