"""Configuration of the engine: every flag, its default, its limits and its meaning."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from models.cudagraph_mode import CUDAGraphMode
from services.engine.compilation_config import (
    DEFAULT_CACHE_DIR,
    DEFAULT_SPLITTING_OPS,
    CompilationConfig,
    CompilationLevel,
    OperatorName,
    Size,
)
from services.engine.flag_reach import FLAG_REACH
from services.telemetry.tracing import OtlpEndpoint

REPOSITORY = Path(__file__).resolve().parents[2]
TINY_CHECKPOINT = REPOSITORY / "models" / "checkpoints" / "tiny"
AUTO = "auto"

CaptureSizes = Annotated[
    list[Size] | Literal["auto"],
    # The command line makes a list of whatever it reads for a field that may be one.
    BeforeValidator(lambda value: AUTO if value == [AUTO] else value),
]


def _with_stubs(is_wanted: bool) -> bool:
    if is_wanted and find_spec("smg_grpc_proto") is None:
        raise ValueError("it needs the extra: pip install 'octavo[gateway]'")
    return is_wanted


VllmGrpc = Annotated[bool, AfterValidator(_with_stubs)]


class EngineConfig(BaseSettings):
    """The Octavo engine: takes token ids over gRPC and returns token ids.

    Each option is a flag (--max-num-seqs 64) and an environment variable
    (OCTAVO_ENGINE_MAX_NUM_SEQS=64); the flag wins.
    """

    model_config = SettingsConfigDict(
        env_prefix="OCTAVO_ENGINE_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_prog_name="octavo engine",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_shortcuts={"cudagraph-capture-sizes": "capture-sizes"},
        protected_namespaces=(),
    )

    model: Path = TINY_CHECKPOINT
    """Folder of the checkpoint, in Hugging Face form. The default is the small embedded model."""
    served_model_name: str = ""
    """Name that requests use; the folder's name when empty."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=50051, ge=0, le=65535)
    """Port to listen on; 0 takes a free one and logs it."""
    tls_cert: Path | None = None
    """Certificate (PEM) to serve with, read again when it changes; plain text when absent."""
    tls_key: Path | None = None
    """Private key (PEM) of --tls-cert."""
    tls_client_ca: Path | None = None
    """Authorities (PEM) of frontends; with it, whoever lacks their certificate is refused."""
    tls_allowed_clients: list[str] = []
    """Names (SAN or CN) of certificates that may call; every one of --tls-client-ca if empty."""
    max_connections: int = Field(default=256, ge=1)
    """Connections taken at a time; more are closed at once."""
    max_streams_per_connection: int = Field(default=256, ge=1)
    """Calls that one connection may have open; more wait at the frontend."""
    max_sessions: int = Field(default=256, ge=1)
    """Sessions of frontends open at a time; one address may have a quarter."""
    vllm_grpc: VllmGrpc = False
    """Serve vllm.grpc.engine.VllmEngine too, on the same port, for gateways that speak it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes CUDA when there is a device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of weights and activations; auto: the checkpoint's on CUDA, float32 on a CPU."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Dtype of cached keys and values; auto: the model's; fp8_e4m3: 8 bits, with scales by head."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """Where weights come from; dummy fills them with seeded random numbers, for benchmarks."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Most tokens of prompt and output together; the checkpoint's own limit when absent."""
    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens in one block of the KV cache."""
    num_kv_blocks: int | None = Field(default=None, ge=2)
    """Blocks of the KV cache; sized from memory when absent."""
    kv_cache_memory_mb: int = Field(default=256, ge=1)
    """MiB for the KV cache on a CPU, when num_kv_blocks is absent."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that weights, activations and KV cache may take together."""
    max_num_seqs: int = Field(default=256, ge=1, le=4096)
    """Most requests in one step."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Most query tokens in one step; prompts are computed in chunks that fit."""
    max_num_waiting: int = Field(default=1024, ge=1)
    """Most requests that wait; beyond it they are refused with RESOURCE_EXHAUSTED."""
    priority_ageing_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds of waiting that priority 1 is worth; the priority made up for doubles with each."""
    enable_prefix_caching: bool = True
    """Reuse the blocks of prompts that begin alike."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the model's operations; more than one hurts small models."""
    enforce_eager: bool = False
    """Run the model as it is written: no compilation and no graphs, whatever else is asked."""
    compilation_level: int = Field(default=0, ge=0, le=3)
    """0 none, 1 traced only, 2 compiled as a whole, 3 compiled in pieces around attention."""
    cudagraph_mode: Literal[
        "auto", "none", "piecewise", "full", "full_decode_only", "full_and_piecewise"
    ] = "auto"
    """What runs as captured graphs; auto: full on CUDA, none on a CPU."""
    cudagraph_capture_sizes: CaptureSizes | None = None
    """Sizes to capture, auto for sizes planned from steps seen; absent: from cuda_graph_sizes.
    Works where graphs are captured."""
    cudagraph_piece_sizes: list[Size] | None = None
    """Sizes of graphs of steps with prompts and of pieces, where they are not those of
    cudagraph_capture_sizes. Works where graphs are captured."""
    cuda_graph_sizes: list[Size] = Field(default=[512], min_length=1)
    """One value N: capture 1, 2, 4, 8 and multiples of 16 up to N; several: these sizes.
    Works where graphs are captured."""
    cudagraph_copy_inputs: bool = False
    """Copy the model's inputs to fixed addresses before compiled pieces run. Works on level 3."""
    num_speculative_tokens: int = Field(default=0, ge=0, le=8)
    """Tokens that the model's draft layers guess ahead in each step; 0 turns speculation off."""
    capture_while_serving: bool = True
    """Be ready before anything is compiled or captured; that then happens between steps."""
    splitting_ops: list[OperatorName] = list(DEFAULT_SPLITTING_OPS)
    """Operators that pieces end at, as namespace::name. Works on levels 0, 2 and 3."""
    use_inductor: bool = True
    """Compile with Inductor; otherwise run traced graphs as they are. Works on levels 2 and 3."""
    compile_sizes: list[Size | Literal["cudagraph_capture_sizes"]] = []
    """Numbers of tokens that get tuned kernels of their own before serving. Works on level 3."""
    inductor_compile_config: dict[str, Any] = {}
    """Settings of torch._inductor.config, as JSON. Works on levels 2 and 3 with Inductor."""
    debug_dump_path: Path | None = None
    """Folder that gets the traced graph, its pieces and generated code. Works on levels 2 and 3."""
    compile_cache_dir: Path = DEFAULT_CACHE_DIR
    """Folder of compiled pieces, shared by all engines that are started with it.
    Works on levels 2 and 3 with Inductor."""
    histogram_dir: str = "~/.cache/octavo/histograms"
    """Folder that keeps how large steps were, to plan sizes from; empty: nothing is kept."""
    fail_on_late_build: bool = False
    """End the worker when something is compiled in the middle of serving, instead of warning."""
    heartbeat_interval_ms: int = Field(default=500, ge=50, le=2000)
    """Longest silence on a session."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """A step that takes longer means a hung worker, which is killed and started again."""
    worker_start_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time from starting a worker to its being ready."""
    worker_patience_s: float = Field(default=60.0, ge=0)
    """Time that requests wait for a lost worker's successor; then they end with UNAVAILABLE."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """Time that running requests have to finish after SIGTERM or Drain."""
    max_grammar_bytes: int = Field(default=2**16, ge=1)
    """Longest schema, regular expression or grammar of a request, in bytes."""
    max_structured_requests: int = Field(default=256, ge=1)
    """Most live requests whose output follows a grammar; beyond it they are refused."""
    grammar_timeout_s: float = Field(default=5.0, gt=0, le=30)
    """Longest time to compile a grammar, and to find out what it allows for one token."""
    num_grammar_threads: int = Field(default=4, ge=1, le=64)
    """Threads that find out what grammars allow, beside the steps."""
    credit_window: int = Field(default=64, ge=1)
    """Step messages a session may leave unread before steps are merged."""
    slow_reader_timeout_s: float = Field(default=10.0, gt=0)
    """A reader that takes nothing for this long while output waits loses its requests."""
    max_message_bytes: int = Field(default=16 * 2**20, ge=2**16)
    """Largest gRPC message taken."""
    allow_watch_tokens: bool = False
    """Let WatchSteps show token ids."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port that answers with metrics for Prometheus; 0 takes a free one; none when absent."""
    otlp_endpoint: OtlpEndpoint | None = None
    """Collector that gets traces over OTLP/gRPC, as http://host:4317; no traces when absent."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line that is logged."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """How lines look; auto means console on a terminal and json elsewhere."""

    @field_validator("num_speculative_tokens")
    @classmethod
    def _check_speculation(cls, value: int, others: ValidationInfo) -> int:
        """Refuses what speculation does not go together with; those fields stand before it."""
        budget = others.data.get("max_num_batched_tokens", value + 1)
        if value and budget <= value:
            raise ValueError(f"it must be less than max_num_batched_tokens, which is {budget}")
        block_size = others.data.get("block_size", value + 1)
        if value and block_size <= value:
            raise ValueError(f"it must be less than block_size, which is {block_size}")
        if value and others.data.get("cudagraph_capture_sizes") == AUTO:
            raise ValueError("it must be 0 with cudagraph_capture_sizes auto")
        return value

    @field_validator(*(flag for flag, reach in FLAG_REACH.items() if reach.is_refused))
    @classmethod
    def _check_reach(cls, value: Any, others: ValidationInfo) -> Any:
        """Refuses a flag that would do nothing; those that decide that stand before it."""
        assert others.field_name is not None, "it validates fields"
        level = others.data.get("compilation_level")
        if level is None or others.data.get("enforce_eager") or not value:
            return value
        reach = FLAG_REACH[others.field_name]
        use_inductor = others.data.get("use_inductor", True)
        if not reach.holds(level, use_inductor=use_inductor):
            without = "" if use_inductor else ", without Inductor"
            raise ValueError(f"it works {reach}; compilation_level is {level}{without}")
        return value

    @property
    def model_name(self) -> str:
        """The name requests use."""
        return self.served_model_name or self.model.resolve().name

    def compilation_config(self, device_type: str) -> CompilationConfig:
        """Returns what to compile and capture on a device.

        Args:
            device_type: "cpu" or "cuda".
        """
        level = CompilationLevel(0 if self.enforce_eager else self.compilation_level)
        sizes, piece_sizes = self.cudagraph_capture_sizes, self.cudagraph_piece_sizes
        return CompilationConfig(
            level=level,
            cudagraph_mode=self._graph_mode(device_type),
            # Until it is settled, auto means the same as nothing.
            cudagraph_capture_sizes=tuple(sizes) if isinstance(sizes, list) else None,
            cudagraph_piece_sizes=None if piece_sizes is None else tuple(piece_sizes),
            cuda_graph_sizes=tuple(self.cuda_graph_sizes),
            cudagraph_copy_inputs=self.cudagraph_copy_inputs,
            splitting_ops=tuple(self.splitting_ops),
            use_inductor=self.use_inductor,
            compile_sizes=tuple(self.compile_sizes),
            inductor_compile_config=self.inductor_compile_config,
            debug_dump_path=self.debug_dump_path,
            cache_dir=self.compile_cache_dir,
        )

    def _graph_mode(self, device_type: str) -> CUDAGraphMode:
        if self.enforce_eager:
            return CUDAGraphMode.NONE
        if self.cudagraph_mode != "auto":
            return CUDAGraphMode[self.cudagraph_mode.upper()]
        return CUDAGraphMode.FULL if device_type == "cuda" else CUDAGraphMode.NONE
