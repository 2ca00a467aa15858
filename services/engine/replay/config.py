"""Flags of `octavo replay`: the engine's own, what to replay and against what."""

from pathlib import Path
from typing import Literal

from pydantic_settings import CliPositionalArg, SettingsConfigDict

from protos.engine.v1.recording_pb2 import EngineSettings
from services.engine.config import EngineConfig


class ReplayConfig(EngineConfig):
    """Runs the steps of a recording twice, eagerly and as --against says, and compares them.

    Exits with 0 when nothing differs, 1 when something does or a graph failed its test, 2 when the
    recording cannot be replayed. Limits, drafts, block size, dtype of the cache and load format are
    the recording's, whatever the flags say, and so is the dtype unless --dtype is given.
    """

    model_config = SettingsConfigDict(cli_prog_name="octavo replay")

    trace: CliPositionalArg[Path]
    """File that `octavo record` wrote."""
    against: Literal["eager", "piecewise", "full"]
    """Compared with eager steps: graphs of pieces, graphs of whole steps, or none."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Least severe line that is logged."""

    def engine(self, recorded: EngineSettings) -> EngineConfig:
        """Returns the flags of the engine that was recorded, as far as steps depend on them."""
        own = {name: getattr(self, name) for name in EngineConfig.model_fields}
        limits = {
            "max_num_seqs": recorded.max_num_seqs,
            "max_num_batched_tokens": recorded.max_num_batched_tokens,
            "max_model_len": recorded.max_model_len,
            "block_size": recorded.block_size,
            "num_speculative_tokens": recorded.num_speculative_tokens,
            "load_format": recorded.load_format,
            "kv_cache_dtype": recorded.kv_cache_dtype or "auto",
            "dtype": recorded.dtype if self.dtype == "auto" else self.dtype,
        }
        return EngineConfig(**{**own, **limits})
