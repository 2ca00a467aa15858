"""Configuration of the frontend: every flag, its default, its limits and its meaning."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from services.settings.addresses import bracketed, check_ports, checked_address
from services.settings.flags import MAX_INT32, MAX_WAIT_S
from services.telemetry.tracing import OtlpEndpoint

VARIABLE_PREFIX = "OCTAVO_FRONTEND_"
"""Of environment variables that are settings."""

MIN_REQUEST_BYTES = 8 * 2**20
"""Room for some images in a gRPC message."""

CORS_ORIGINS = r"^(\*|https?://[^/,\s*]+(,https?://[^/,\s*]+)*)$"
"""An origin is a scheme, a host and maybe a port, without a path (RFC 6454, section 6.2)."""

LOOPBACK = frozenset({"127.0.0.1", "[::1]", "localhost"})
"""Hosts that only this machine reaches."""

HOSTS = r"^[A-Za-z0-9._-]+(,[A-Za-z0-9._-]+)*$"
"""Names of hosts without ports."""


MEDIA_HOSTS = r"^[A-Za-z0-9.-]+(:[0-9]+)?(,[A-Za-z0-9.-]+(:[0-9]+)?)*$"
"""Names of hosts, maybe with ports."""


def _parted(addresses: str) -> list[str]:
    return [text for text in map(str.strip, addresses.split(",")) if text]


def _checked_addresses(addresses: str) -> str:
    """Refuses a list without an address, and one with an address that gRPC cannot dial."""
    parts = _parted(addresses)
    if not parts:
        raise ValueError("it must have an engine's host:port")
    for address in parts:
        checked_address(address)
    return addresses


class FrontendConfig(BaseSettings):
    """The Octavo frontend: takes text over gRPC, on wish over HTTP, and streams text back.

    Each option is a flag (--engine-address host:50051) and an environment variable
    (OCTAVO_FRONTEND_ENGINE_ADDRESS=host:50051); the flag wins.
    """

    model_config = SettingsConfigDict(
        env_prefix=VARIABLE_PREFIX,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        cli_prog_name="octavo frontend",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )

    host: Annotated[str, AfterValidator(bracketed)] = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=50050, ge=0, le=65535)
    """Port to listen on; 0 takes a free one and logs it."""
    http_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of the OpenAI-compatible HTTP API; 0 takes a free one; no HTTP when absent."""
    processes: int = Field(default=1, ge=1, le=64)
    """Processes that share the ports, each with an event loop, so up to a core, of its own."""
    cors_origins: str | None = Field(default=None, pattern=CORS_ORIGINS)
    """Origins of web pages that may use HTTP, with commas between, or * for all; none if absent."""
    allowed_hosts: str | None = Field(default=None, pattern=HOSTS)
    """Names under which HTTP is asked, with commas between; without API keys, a loopback address
    answers only these, localhost and loopback addresses."""
    engine_address: Annotated[str, AfterValidator(_checked_addresses)] = "127.0.0.1:50051"
    """The engines, as host:port with commas between; a host name may stand for several engines."""
    engine_resolve_interval_s: float = Field(default=5.0, gt=0, le=MAX_WAIT_S)
    """Time after which the engines' names are resolved again; engines may join and leave so."""
    max_engine_attempts: int = Field(default=3, ge=1, le=MAX_INT32)
    """Engines tried in turn for a request's next token, before the request fails."""
    tokenizer: Path | None = None
    """Folder of the tokenizer's files; they must be the engine's. Fetched from it when absent."""
    max_message_bytes: int = Field(default=16 * 2**20, ge=2**16, le=MAX_INT32)
    """Largest gRPC message or HTTP body taken; messages not more than the engine takes."""
    max_prompt_bytes: int = Field(default=2**20, ge=1, le=MAX_INT32)
    """Longest prompt or conversation, in bytes of UTF-8, that is tokenized."""
    media_hosts: str | None = Field(default=None, pattern=MEDIA_HOSTS)
    """Hosts, as name or name:port with commas between, from which https URLs of images are fetched;
    none when absent."""
    max_images_per_request: int = Field(default=64, ge=0, le=4096)
    """Most images of a request; 0 refuses them."""
    max_image_pixels: int = Field(default=64_000_000, ge=1, le=2**30)
    """Most pixels of an image, width times height; each process that reads images may take 24 bytes
    of memory for each."""
    max_pixels_per_request: int = Field(default=256_000_000, ge=1, le=2**40)
    """Most pixels of all images of a request."""
    num_image_processes: int | None = Field(default=None, ge=1, le=256)
    """Processes that read images, started when they are needed; absent: one per core, shared by
    --processes."""
    max_image_memory_bytes: int = Field(default=2**31, ge=1, le=2**40)
    """Memory of unfinished requests' images, as files and as patches; one key, or one address
    without keys, may have a quarter."""
    image_cache_bytes: int = Field(default=2**28, ge=0, le=2**40)
    """Memory of images that were read lately, which conversations send again with each turn."""
    tls_cert: Path | None = None
    """Certificate (PEM) of gRPC and HTTP, read again when it changes; plain text when absent."""
    tls_key: Path | None = None
    """Private key (PEM) of --tls-cert."""
    tls_client_ca: Path | None = None
    """Authorities (PEM) of clients; with it, clients without their certificate are refused."""
    engine_tls_ca: Path | None = None
    """Authorities (PEM) of engines; turns TLS to the engine on."""
    engine_tls_cert: Path | None = None
    """Certificate (PEM) that engines are shown; read again at each connection."""
    engine_tls_key: Path | None = None
    """Private key (PEM) of --engine-tls-cert."""
    api_keys_file: Path | None = None
    """File of API keys and their limits (TOML), read again when it changes; open when absent."""
    max_connections: int = Field(default=1024, ge=1, le=MAX_INT32)
    """Connections that gRPC and HTTP each take; more are closed, at HTTP the longest idle ones."""
    max_connections_per_address: int = Field(default=512, ge=1, le=MAX_INT32)
    """HTTP connections from one IPv4 address or IPv6 /64; raise it behind a reverse proxy."""
    max_streams_per_connection: int = Field(default=256, ge=1, le=MAX_INT32)
    """Calls that one gRPC connection may have open; more wait at the client."""
    max_sessions: int = Field(default=256, ge=1, le=MAX_INT32)
    """Sessions open at a time; one key, or one address without keys, may have a quarter."""
    session_idle_timeout_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """A session that holds no request and sends nothing for this long is ended."""
    http_header_timeout_s: float = Field(default=10.0, gt=0, le=MAX_WAIT_S)
    """An HTTP connection whose request line and headers take longer is closed."""
    template_timeout_s: float = Field(default=2.0, gt=0, le=MAX_WAIT_S)
    """A chat template that takes longer to render a conversation is stopped."""
    reply_format: Literal[
        "auto", "hermes", "llama3_json", "pythonic", "mistral", "mistral_v11", "deepseek_v3",
        "deepseek_v31", "glm4", "qwen3_coder", "seed_oss", "minimax_m2", "minimax_m3", "kimi_k2",
        "gemma4", "harmony", "plain",
    ] = "auto"  # fmt: skip
    """Format of tool calls and reasoning in chats; auto chooses it from the chat template."""
    allow_lora_updates: bool = False
    """Serve calls that load and remove adapters, over gRPC and as vLLM's over HTTP, to keys with
    the operator right; beyond loopback they need --api-keys-file."""
    allow_sleep: bool = False
    """Serve vLLM's HTTP calls that put engines to sleep and wake them, to keys with the operator
    right; beyond loopback they need --api-keys-file."""
    swap_level: int | None = Field(default=None, ge=1, le=2)
    """Each engine has a model of its own and all share a card: one is awake, the others sleep at
    this level, and they take turns by demand. Absent: all engines serve one model."""
    swap_min_awake_s: float = Field(default=10.0, ge=0, le=MAX_WAIT_S)
    """Time for which a model with requests keeps the card while another one is wanted."""
    swap_drain_s: float = Field(default=10.0, ge=0, le=MAX_WAIT_S)
    """Time for its running requests to end after that; then they wait, and are computed again."""
    swap_max_waiting: int = Field(default=1024, ge=1, le=MAX_INT32)
    """Requests that may wait for a model that sleeps; more are refused."""
    strict_fields: bool = False
    """Refuse fields of HTTP bodies that nothing here can follow, instead of ignoring them."""
    max_reasoning_tokens: int | None = Field(default=None, ge=0, le=2**32 - 1)
    """Tokens after which a chat's reasoning is ended, unless it has its own limit."""
    max_live_requests: int = Field(default=1024, ge=1, le=MAX_INT32)
    """Requests that one client session, or HTTP as a whole, may have unfinished."""
    max_samples: int = Field(default=32, ge=1, le=128)
    """Most outputs that one request may have: its prompts times n."""
    max_stored_responses: int = Field(default=1024, ge=0, le=MAX_INT32)
    """Responses of /v1/responses that are kept for later requests; 0 keeps none."""
    max_stored_response_bytes: int = Field(default=64 * 2**20, ge=0, le=2**40)
    """Memory that stored responses and their conversations may take, in bytes."""
    max_stored_response_age_s: float = Field(default=86400.0, gt=0, le=1e9)
    """Time after which a stored response is forgotten."""
    num_tokenizer_threads: int = Field(default=2, ge=1, le=64)
    """Threads that tokenize; half as many processes take texts of over 65,536 characters."""
    engine_silence_timeout_s: float = Field(default=2.5, gt=0, le=MAX_WAIT_S)
    """An engine that says nothing for this long is lost; it sends a sign of life every 500 ms."""
    slow_reader_timeout_s: float = Field(default=10.0, gt=0, le=MAX_WAIT_S)
    """A client that takes nothing for this long while output waits loses its stream."""
    drain_timeout_s: float = Field(default=30.0, ge=0, le=MAX_WAIT_S)
    """Time that running requests have to finish after SIGTERM."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port that answers with metrics for Prometheus; 0 takes a free one; none when absent."""
    otlp_endpoint: OtlpEndpoint | None = None
    """Collector that gets traces over OTLP/gRPC, as http://host:4317; no traces when absent."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line that is logged."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """How lines look; auto means console on a terminal and json elsewhere."""

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        flags = ("port", "http_port", "metrics_port")
        check_ports({f"--{flag.replace('_', '-')}": getattr(self, flag) for flag in flags})
        return self

    @model_validator(mode="after")
    def _check_operators(self) -> Self:
        has_callers = self.api_keys_file is not None or self.host in LOOPBACK
        if self.allow_lora_updates and not has_callers:
            raise ValueError(
                "--allow-lora-updates needs --api-keys-file beyond loopback, so that only operators"
                " change adapters"
            )
        if self.allow_sleep and not has_callers:
            raise ValueError(
                "--allow-sleep needs --api-keys-file beyond loopback, so that only operators put"
                " engines to sleep"
            )
        return self

    @model_validator(mode="after")
    def _check_swaps(self) -> Self:
        """Refuses what would give a shared card other owners."""
        if self.swap_level is None:
            return self
        others = {"--processes": self.processes > 1, "--allow-sleep": self.allow_sleep}
        if found := [flag for flag, is_set in others.items() if is_set]:
            raise ValueError(
                f"--swap-level and {found[0]} exclude each other: one process decides which model "
                "is awake"
            )
        return self

    @property
    def max_request_bytes(self) -> int:
        """Largest gRPC message taken: with room for options beside the longest prompt."""
        return min(self.max_message_bytes, max(MIN_REQUEST_BYTES, 4 * self.max_prompt_bytes))

    @property
    def host_names(self) -> list[str]:
        """The names of --allowed-hosts, one by one."""
        return _parted(self.allowed_hosts or "")

    @property
    def media_host_names(self) -> list[str]:
        """The hosts of --media-hosts, one by one."""
        return _parted(self.media_hosts or "")

    @property
    def engine_addresses(self) -> list[str]:
        """The engines' addresses, one by one."""
        return _parted(self.engine_address)
