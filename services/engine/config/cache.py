"""The KV cache."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from services.engine.config.section import ConfigSection
from services.settings.flags import MAX_INT32

PrefixTokens = Annotated[
    Annotated[int, Field(ge=0, le=MAX_INT32)] | Literal["auto"],
    # The command line and the environment give text.
    BeforeValidator(lambda value: int(value) if str(value).isdigit() else value),
]


class CacheConfig(ConfigSection):
    """The KV cache: dtype, blocks and memory."""

    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Dtype of cached keys and values; auto: the model's; fp8_e4m3: 8 bits, with scales."""
    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens in one block of the KV cache."""
    num_kv_blocks: int | None = Field(default=None, ge=2, le=MAX_INT32)
    """Blocks of the KV cache; sized from memory when absent."""
    kv_cache_memory_mb: int = Field(default=256, ge=1, le=MAX_INT32)
    """MiB for the KV cache on a CPU, when num_kv_blocks is absent."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that weights, activations and KV cache may take together."""
    host_kv_gb: float = Field(default=0.0, ge=0, le=65536)
    """GiB of each rank's host memory for blocks that leave the GPU; 0 for none."""
    disk_kv_dir: Path | None = None
    """Folder for blocks that outlive the engine; needs --host-kv-gb."""
    disk_kv_gb: float = Field(default=16.0, gt=0, le=2**20)
    """GiB of files that --disk-kv-dir may hold for this model."""
    enable_prefix_caching: bool = True
    """Reuse the blocks of prompts that begin alike."""
    shared_prefix_tokens: PrefixTokens = "auto"
    """Running requests that begin alike read their common prefix once a step where that saves
    reading this many tokens again, its length for each request but one; 0: never; auto: as many as
    the tables of the GPU say, on a CPU and for drafts with an FP8 cache never."""
    kv_events: bool = False
    """Let callers follow which blocks are cached, with the tokens of requests without a salt."""

    @property
    def least_prefix_tokens(self) -> int | None:
        """Tokens that a shared prefix must save; None where the worker chooses."""
        return None if self.shared_prefix_tokens == "auto" else self.shared_prefix_tokens
