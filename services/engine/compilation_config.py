"""What is compiled, what is captured as graphs, and where results are kept."""

import enum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from models.cudagraph_mode import CUDAGraphMode

DEFAULT_SPLITTING_OPS = (
    "octavo::unified_attention_with_output",
    "octavo::latent_attention_with_output",
)
"""Attention reads metadata that changes from step to step and brings kernels of its own."""

DEFAULT_CACHE_DIR = Path("~/.cache/octavo/compile")


Size = Annotated[int, Field(ge=1)]
OperatorName = Annotated[str, Field(pattern=r"^\w+::\w+$")]


class CompilationLevel(enum.IntEnum):
    """How much of a model is compiled."""

    NO_COMPILATION = 0
    """The model runs as it is written."""
    DYNAMO_AS_IS = 1
    """Traced in one graph and run as traced: shows whether a model can be traced."""
    DYNAMO_ONCE = 2
    """Traced once and compiled as a whole; no guard is evaluated while serving."""
    PIECEWISE = 3
    """Traced once, split at attention, and each distinct piece compiled once."""


class CompilationConfig(BaseModel):
    """The settled choice for one worker; `EngineConfig.compilation_config` makes it from flags."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=()
    )

    level: CompilationLevel = CompilationLevel.NO_COMPILATION
    """How much is compiled."""
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE
    """What is captured as graphs."""
    cudagraph_capture_sizes: tuple[Size, ...] | None = None
    """Sizes to capture; made from cuda_graph_sizes when absent."""
    cudagraph_piece_sizes: tuple[Size, ...] | None = None
    """Sizes of graphs of pieces; made from the other two when absent."""
    cuda_graph_sizes: tuple[Size, ...] = (512,)
    """One value: the largest of a pattern of sizes; several: the sizes themselves."""
    cudagraph_copy_inputs: bool = False
    """Copy the model's inputs to fixed addresses before its pieces run, at level 3."""
    splitting_ops: tuple[OperatorName, ...] = DEFAULT_SPLITTING_OPS
    """Operators that the graph is split at, as namespace::name."""
    use_inductor: bool = True
    """Compile with Inductor; otherwise traced graphs run as they are."""
    compile_sizes: tuple[Size | Literal["cudagraph_capture_sizes"], ...] = ()
    """Numbers of tokens that get kernels of their own beside the general ones."""
    inductor_compile_config: dict[str, Any] = Field(default_factory=dict)
    """Settings of torch._inductor.config, by name."""
    debug_dump_path: Path | None = None
    """Folder for the traced graph, its pieces and generated code; rank 0's go to rank_0."""
    cache_dir: Path = DEFAULT_CACHE_DIR
    """Folder of compiled pieces."""

    def capture_sizes(self, limit: int) -> tuple[int, ...]:
        """Returns the sizes to capture for decode steps, ascending.

        Sizes above the limit are left out, as no step reaches them. Where the limit cuts the
        pattern short it is a size itself, or the largest steps would find no graph.

        Args:
            limit: largest size that a step can have.
        """
        sizes = self.cudagraph_capture_sizes
        if sizes is None and len(self.cuda_graph_sizes) > 1:
            sizes = self.cuda_graph_sizes
        if sizes is None:
            largest = self.cuda_graph_sizes[0]
            sizes = (1, 2, 4, 8, *range(16, largest + 1, 16), *([limit] if limit < largest else []))
            limit = min(limit, largest)
        return tuple(sorted({size for size in sizes if size <= limit}))

    def piece_sizes(self, limit: int) -> tuple[int, ...]:
        """Returns the sizes to capture for steps that run in pieces, ascending.

        The pattern goes on to four times its largest size, in steps of an eighth of a power of two:
        a prompt brings more tokens than a decode step has requests, and beyond that a step keeps
        the device busy for longer than its launches take.

        Args:
            limit: largest number of query tokens that a step can have.
        """
        if self.cudagraph_piece_sizes is not None:
            return tuple(sorted({size for size in self.cudagraph_piece_sizes if size <= limit}))
        sizes = self.capture_sizes(limit)
        if self.cudagraph_capture_sizes is not None or len(self.cuda_graph_sizes) > 1:
            return sizes
        largest = self.cuda_graph_sizes[0]
        beyond = {eighth << bits for bits in range(20) for eighth in range(8, 16)}
        more = {size for size in beyond if largest < size <= min(limit, 4 * largest)}
        if largest < limit < 4 * largest:
            more.add(limit)
        return tuple(sorted({*sizes, *more}))

    def specialised_sizes(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
        """Returns the numbers of tokens that get kernels of their own, ascending."""
        sizes: set[int] = set()
        for size in self.compile_sizes:
            sizes.update(self.capture_sizes(max_num_seqs) if isinstance(size, str) else [size])
        return sorted(size for size in sizes if size <= max_num_batched_tokens)
