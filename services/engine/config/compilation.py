"""Compilation and CUDA graphs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from models.cudagraph_mode import CUDAGraphMode
from services.engine.config.compilation_level import CompilationLevel
from services.engine.config.flag_reach import FLAG_REACH, GRAPHS, Reach
from services.engine.config.section import ConfigSection
from services.processes.private_folder import private_path
from services.settings.flags import MAX_INT32

PassName = Literal[
    "canonical",
    "linear_gate",
    "multi_stream",
    "linear_residual",
    "all_reduce_norm",
    "residual_norm",
    "norm_linear",
    "norm_quant",
    "packed_residual",
    "activation_quant",
    "attention_quant",
    "qk_norm_rope_cache",
    "clean_up",
]
PASS_NAMES: tuple[PassName, ...] = get_args(PassName)


AUTO = "auto"
MAX_NUM_STREAMS = 64
MOST_ENCODER_PATCHES = 8192
"""Patches of the largest graph of an encoder by default, those of two images of a megapixel."""
DEFAULT_SPLITTING_OPS = (
    "octavo::unified_attention_with_output",
    "octavo::latent_attention_with_output",
    "octavo::compressed_attention_with_output",
    "octavo::block_sparse_attention_with_output",
    "octavo::gated_delta_net",
    "octavo::mamba2",
    "octavo::short_conv",
    "octavo::lightning_attention",
)
"""Mixers read metadata that changes from step to step and bring kernels of their own."""

Size = Annotated[int, Field(ge=1, le=MAX_INT32)]
Level = Annotated[
    Literal[0, 1, 2, 3, "auto"],
    # The command line and the environment give text.
    BeforeValidator(lambda value: int(value) if str(value).isdigit() else value),
]
OperatorName = Annotated[str, Field(pattern=r"^\w+::\w+$")]
CaptureSizes = Annotated[
    list[Size] | Literal["auto"],
    # The command line makes a list of any value of a field that may be a list.
    BeforeValidator(lambda value: AUTO if value == [AUTO] else value),
]


class CompilationConfig(ConfigSection):
    """Levels of compilation, graphs to capture, and where results are kept."""

    enforce_eager: bool = False
    """Run the model as it is written: no compilation and no graphs, whatever else is asked."""
    compilation_level: Level = "auto"
    """0 none, 1 traced only, 2 compiled as a whole, 3 compiled in pieces around attention;
    auto: 3 on CUDA, 0 on a CPU."""
    use_inductor: bool = True
    """Compile with Inductor; otherwise run traced graphs as they are. Works on levels 2 and 3."""
    splitting_ops: list[OperatorName] = Field(default=list(DEFAULT_SPLITTING_OPS))
    """Operators that pieces end at, as namespace::name. Works on levels 0, 2 and 3."""
    passes: list[PassName] = Field(default=list(PASS_NAMES))
    """Compiler passes to run, always in this order. Works on levels 2 and 3."""
    disable_pass: list[PassName] = Field(default=[])
    """Compiler passes to leave out. Works on levels 2 and 3."""
    max_num_streams: int = Field(default=2, ge=1, le=MAX_NUM_STREAMS)
    """Most streams that a step runs on; with 2 the multi_stream pass runs shared experts beside
    routed ones. Works on levels 2 and 3."""
    allow_unmatched_passes: bool = False
    """Warn, instead of refusing to compile, when a pass matches nothing that the model promises.
    Works on levels 2 and 3."""
    compile_sizes: list[Size | Literal["cudagraph_capture_sizes"]] = Field(default=[])
    """Numbers of tokens that get tuned kernels of their own before serving. Works on level 3."""
    compile_ranges: list[Size] = Field(default=[])
    """Largest numbers of tokens of ranges that are compiled apart. Works on levels 2 and 3."""
    inductor_compile_config: dict[str, Any] = Field(default={})
    """Settings of torch._inductor.config, as JSON. Works on levels 2 and 3 with Inductor."""
    debug_dump_path: Path | None = None
    """Folder that gets the traced graph, its pieces and generated code. Works on levels 2 and 3."""
    compile_cache_dir: Path = Path("~/.cache/octavo/compile")
    """Folder of kernels, traces and compiled pieces, shared by all engines that are started with
    it. Each user has a private folder in it."""
    cudagraph_mode: Literal[
        "auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise"
    ] = "auto"
    """Graphs to capture; auto: full on CUDA, none on a CPU."""
    cudagraph_capture_sizes: CaptureSizes | None = None
    """Sizes to capture, auto for sizes planned from steps seen; absent: from cuda_graph_sizes.
    Works where graphs are captured."""
    cudagraph_piece_sizes: list[Size] | None = None
    """Sizes of graphs of steps with prompts and of pieces, where they are not those of
    cudagraph_capture_sizes. Works where graphs are captured."""
    cudagraph_encoder_sizes: list[Size] | None = None
    """Numbers of patches of the graphs of an image encoder; absent: a pattern up to
    max_encoder_tokens. Works where graphs are captured."""
    cuda_graph_sizes: list[Size] = Field(default=[512], min_length=1)
    """One value N: capture 1, 2, 4, 8 and multiples of 16 up to N; several: these sizes.
    Works where graphs are captured."""
    cudagraph_padding: bool = True
    """Let the next larger graph run a step that has none of its own size. Works where graphs are
    captured."""
    cudagraph_copy_inputs: bool = False
    """Copy a step's inputs to addresses of their own before its graphs read them. Works where
    graphs are captured."""
    capture_while_serving: bool = True
    """Be ready before anything is compiled or captured; that then happens between steps."""
    fail_on_late_build: bool = False
    """End the worker when something is compiled in the middle of serving, instead of warning."""
    histogram_dir: str | None = None
    """Folder that keeps how large steps were, to plan sizes from; empty: nothing is kept; absent:
    compile_cache_dir."""

    @field_validator(*(flag for flag, reach in FLAG_REACH.items() if reach.is_refused))
    @classmethod
    def _check_reach(cls, value: Any, others: ValidationInfo) -> Any:
        """Refuses a flag without effect; the fields that decide this come first."""
        assert others.field_name is not None, "it validates fields"
        level = others.data.get("compilation_level")
        if level in (None, AUTO) or others.data.get("enforce_eager") or not value:
            return value
        reach = FLAG_REACH[others.field_name]
        use_inductor = others.data.get("use_inductor", True)
        if not reach.holds(level, use_inductor=use_inductor):
            without = "" if use_inductor else ", without Inductor"
            raise ValueError(f"it works {reach}; compilation_level is {level}{without}")
        return value

    @field_validator("cudagraph_padding")
    @classmethod
    def _check_padding(cls, value: bool, others: ValidationInfo) -> bool:
        """Refuses planned sizes without padding: planned sizes pad least, but they do pad."""
        if not value and others.data.get("cudagraph_capture_sizes") == AUTO:
            raise ValueError("it must be on with cudagraph_capture_sizes auto")
        return value

    @property
    def code_dir(self) -> Path:
        """This user's own folder in compile_cache_dir, which holds all code that workers load."""
        return private_path(self.compile_cache_dir)

    @property
    def level(self) -> CompilationLevel:
        """How much of the model is compiled; the level must be chosen, see `level_on`."""
        assert self.compilation_level != "auto", "the worker chooses the level for its device"
        return CompilationLevel(0 if self.enforce_eager else self.compilation_level)

    def level_on(self, device_type: str) -> CompilationLevel:
        """Returns how much of the model is compiled on a device, "cpu" or "cuda"."""
        if self.enforce_eager:
            return CompilationLevel.NO_COMPILATION
        if self.compilation_level == "auto":
            is_cuda = device_type == "cuda"
            return CompilationLevel.PIECEWISE if is_cuda else CompilationLevel.NO_COMPILATION
        return CompilationLevel(self.compilation_level)

    @property
    def selected_passes(self) -> tuple[PassName, ...]:
        """The compiler passes to run, in order."""
        names = set(self.passes) - set(self.disable_pass)
        if self.max_num_streams == 1:
            names.discard("multi_stream")
        return tuple(name for name in PASS_NAMES if name in names)

    def graph_mode(self, device_type: str) -> CUDAGraphMode:
        """Returns which graphs to capture on a device.

        Args:
            device_type: "cpu" or "cuda".
        """
        if self.enforce_eager:
            return CUDAGraphMode.NONE
        if self.cudagraph_mode != AUTO:
            return CUDAGraphMode[self.cudagraph_mode.upper()]
        return CUDAGraphMode.FULL if device_type == "cuda" else CUDAGraphMode.NONE

    def idle_flags(self, device_type: str) -> Iterator[tuple[str, Reach]]:
        """Yields the flags that are set without effect on a device.

        Sizes of graphs have an effect without graphs if kernels are compiled for the same sizes.
        """
        has_graphs = bool(self.graph_mode(device_type))
        names_sizes = "cudagraph_capture_sizes" in self.compile_sizes
        for flag, reach in FLAG_REACH.items():
            is_set = getattr(self, flag) != type(self).model_fields[flag].default
            has_effect = (reach is GRAPHS and names_sizes) or reach.holds(
                self.level_on(device_type), use_inductor=self.use_inductor, has_graphs=has_graphs
            )
            if is_set and not has_effect:
                yield flag, reach

    def capture_sizes(self, limit: int) -> tuple[int, ...]:
        """Returns the sizes to capture for decode steps, ascending.

        Sizes above the limit are left out. If the limit cuts the pattern short, it is a size
        itself, so that the largest steps find a graph.

        Args:
            limit: largest size of a step.
        """
        sizes: Sequence[int] | None = self._listed_sizes
        if sizes is None:
            largest = self.cuda_graph_sizes[0]
            cut = [limit] if limit < largest else []
            limit = min(limit, largest)
            sizes = (1, 2, 4, 8, *range(16, limit + 1, 16), *cut)
        return tuple(sorted({size for size in sizes if size <= limit}))

    def piece_sizes(self, limit: int) -> tuple[int, ...]:
        """Returns the sizes to capture for steps that run in pieces, ascending.

        The pattern continues to four times its largest size, in steps of an eighth of a power of
        two: prompts bring more tokens than decode steps have requests, and larger steps take the
        device longer than their launches.

        Args:
            limit: most query tokens of a step.
        """
        if self.cudagraph_piece_sizes is not None:
            return tuple(sorted({size for size in self.cudagraph_piece_sizes if size <= limit}))
        sizes = self.capture_sizes(limit)
        if self._listed_sizes is not None:
            return sizes
        largest = self.cuda_graph_sizes[0]
        beyond = {eighth << bits for bits in range(20) for eighth in range(8, 16)}
        more = {size for size in beyond if largest < size <= min(limit, 4 * largest)}
        if largest < limit < 4 * largest:
            more.add(limit)
        return tuple(sorted({*sizes, *more}))

    def encoder_sizes(self, limit: int, unit: int) -> tuple[int, ...]:
        """Returns the numbers of patches to capture for the encoder of images, ascending.

        By default quarters of powers of two, so that padding is at most a fifth.

        Args:
            limit: most patches of a step that encodes several images.
            unit: patches that all sizes are multiples of.
        """
        sizes: Sequence[int] | None = self.cudagraph_encoder_sizes
        if sizes is None:
            most = min(limit, MOST_ENCODER_PATCHES)
            pattern = {quarter << bits for bits in range(6, 20) for quarter in range(4, 8)}
            sizes = [*(size for size in pattern if size < most), most]
        return tuple(sorted({unit * -(-size // unit) for size in sizes}))

    def specialised_sizes(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
        """Returns the numbers of tokens with kernels of their own, ascending."""
        sizes: set[int] = set()
        for size in self.compile_sizes:
            sizes.update(self.capture_sizes(max_num_seqs) if isinstance(size, str) else [size])
        return sorted(size for size in sizes if size <= max_num_batched_tokens)

    @property
    def _listed_sizes(self) -> list[int] | None:
        """The sizes of decode steps, if the flags list them; before planning, auto lists none."""
        if isinstance(self.cudagraph_capture_sizes, list):
            return self.cudagraph_capture_sizes
        return self.cuda_graph_sizes if len(self.cuda_graph_sizes) > 1 else None
