"""Flags of `octavo replay`: the engine's own, what to replay and against what."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic_settings import CliPositionalArg

from protos.engine.v1.recording_pb2 import EngineSettings
from services.engine.config.engine_config import EngineConfig
from services.engine.config.observability import ObservabilityConfig
from services.engine.config.parallel import ParallelConfig
from services.engine.config.section import ConfigSection


class ReplaySection(ConfigSection):
    """The recording, and the graphs that its steps are tested with."""

    trace: CliPositionalArg[Path]
    """Recording: a file that `octavo record` wrote from an engine with --allow-watch-tokens."""
    against: Literal["eager", "invariant", "piecewise", "full"]
    """The other side of the comparison with eager steps. eager: the same again, to see whether the
    recording can be repeated; invariant: each row alone, where every bit counts; full: graphs of
    whole steps; piecewise: graphs of pieces."""


class ReplayObservability(ObservabilityConfig):
    """Metrics, traces and logs: warnings by default, as the replay prints its results."""

    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Least severe line that is logged."""


class ReplayConfig(EngineConfig):
    """Finds the step and the tensor at which tokens go wrong.

    Runs the steps of a recording twice, without graphs and as --against says, and compares every
    result. Example: octavo replay trace.binpb --against full

    Exits with 0 when nothing differs, 1 when something does or a graph failed its test, 2 when the
    recording cannot be replayed. One process replays, on the first of --devices. Limits, drafts,
    block size, dtype of the cache, load format and quantization are the recording's, whatever the
    flags say, and so is the dtype unless --dtype is given. --batch-invariant is on if it was, or if
    the flag is given. --lora must name the adapters that the recorded steps use.
    """

    program: ClassVar[str] = "octavo replay"

    replay: ReplaySection
    observability: ReplayObservability = ReplayObservability()

    def engine(self, recorded: EngineSettings) -> EngineConfig:
        """Returns the recorded engine's flags that steps depend on."""
        limits = {
            "max_num_seqs": recorded.max_num_seqs,
            "max_num_batched_tokens": recorded.max_num_batched_tokens,
            "max_model_len": recorded.max_model_len,
            "block_size": recorded.block_size,
            "num_speculative_tokens": recorded.num_speculative_tokens,
            "speculative_method": recorded.speculative_method or "mtp",
            "load_format": recorded.load_format,
            "quantization": recorded.quantization or "none",
            "task": recorded.task or "generate",
            "batch_invariant": recorded.batch_invariant or self.worker.batch_invariant,
            "kv_cache_dtype": recorded.kv_cache_dtype or "auto",
            # Steps share what they shared when they were recorded.
            "shared_prefix_tokens": int(self.cache.shared_prefix_tokens != 0),
            "max_loras": recorded.max_loras,
            "max_lora_rank": recorded.max_lora_rank or self.adapters.max_lora_rank,
            "lora_embeddings": recorded.lora_embeddings,
            "lora_experts": recorded.lora_experts,
            "lora": self.adapters.lora if recorded.max_loras else [],
            "lora_folder": None,
            # One process replays, with the whole model.
            **ParallelConfig().model_dump(),
            "devices": None if self.parallel.devices is None else self.parallel.devices[:1],
            "dtype": recorded.dtype if self.checkpoint.dtype == "auto" else self.checkpoint.dtype,
        }
        own = {
            name: value
            for name, value in self.flags().items()
            if name not in ReplaySection.model_fields
        }
        return EngineConfig.from_flags(**{**own, **limits})
