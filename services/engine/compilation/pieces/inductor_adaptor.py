"""Compiles pieces with Inductor."""

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch._inductor.codecache import torch_key
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.standalone_compile import AOTCompiledArtifact
from torch.fx import GraphModule

from services.engine.compilation.pieces.compiler_interface import LoadError, Runnable
from services.processes.private_folder import make_private

LOAD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.PickleError,
)
"""torch's errors for an artifact of another torch, another machine, or none at all."""

TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
"""Settings for a known shape."""


class InductorStandaloneAdaptor:
    """Inductor through torch's standalone_compile, with artifacts that other processes can load.

    An artifact is one self-contained byte string, so processes can read and write it concurrently.
    """

    name = "inductor_standalone"

    def compute_hash(self) -> str:
        """Returns a digest of torch's compiler sources."""
        return hashlib.sha256(torch_key()).hexdigest()

    def compile(
        self,
        graph: GraphModule,
        example_inputs: Sequence[Any],
        compiler_config: Mapping[str, Any],
        runtime_shape: int | None = None,
    ) -> tuple[Runnable, bytes | None]:
        """Compiles a graph for any number of tokens, or tuned for one."""
        _check_code_folder()
        settings = dict(compiler_config)
        if runtime_shape is not None:
            settings = TUNED | settings
        artifact = torch._inductor.standalone_compile(
            graph,
            list(example_inputs),
            dynamic_shapes="from_graph" if runtime_shape is None else "from_example_inputs",
            options={"config_patches": settings},
            aot=True,
        )
        assert isinstance(artifact, AOTCompiledArtifact), "that is what aot=True makes"
        return artifact, artifact.serialize()

    def load(self, handle: bytes) -> Runnable:
        """Loads a compiled piece from an artifact."""
        _check_code_folder()
        try:
            return AOTCompiledArtifact.deserialize(handle)
        except LOAD_ERRORS as error:
            raise LoadError(f"{type(error).__name__}: {error}") from error


def _check_code_folder() -> None:
    """Checks the folder from which Inductor loads code.

    Raises:
        ExposedFolderError: another user can change it.
    """
    make_private(Path(cache_dir()).resolve())
