"""Configuration of the engine, in sections."""

import sys
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

from services.engine.config.cache import CacheConfig
from services.engine.config.checkpoint import CheckpointConfig
from services.engine.config.compilation import AUTO, CompilationConfig
from services.engine.config.grammar import GrammarConfig
from services.engine.config.images import ImagesConfig
from services.engine.config.lora import LoraConfig
from services.engine.config.observability import ObservabilityConfig
from services.engine.config.parallel import LOOPBACK_INTERFACE, ParallelConfig
from services.engine.config.scheduler import (
    DEFAULT_BATCHED_TOKENS,
    PROMPT_SHARE,
    SchedulerConfig,
)
from services.engine.config.section import ConfigSection
from services.engine.config.serving import ServingConfig, is_loopback
from services.engine.config.speculation import SpeculationConfig
from services.engine.config.weights import WeightsConfig
from services.engine.config.worker import WorkerConfig
from services.settings.addresses import check_ports


class EngineConfig(BaseModel):
    """The Octavo engine: takes token ids over gRPC and returns token ids.

    Each option is a flag (--max-num-seqs 64) and an environment variable
    (OCTAVO_ENGINE_MAX_NUM_SEQS=64); the flag wins.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    program: ClassVar[str] = "octavo engine"

    checkpoint: CheckpointConfig = CheckpointConfig()
    serving: ServingConfig = ServingConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    worker: WorkerConfig = WorkerConfig()
    parallel: ParallelConfig = ParallelConfig()
    compilation: CompilationConfig = CompilationConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    grammar: GrammarConfig = GrammarConfig()
    images: ImagesConfig = ImagesConfig()
    adapters: LoraConfig = LoraConfig()
    weights: WeightsConfig = WeightsConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @property
    def max_running(self) -> int:
        """Requests that run at a time, on all data-parallel ranks."""
        return self.scheduler.max_num_seqs * self.parallel.data_parallel_size

    @property
    def max_num_batched_tokens(self) -> int:
        """Most query tokens in one step.

        By default there are enough for all requests to verify all drafts in steps of prompts, too:
        if some had none, decodes would fit no graph.
        """
        scheduler = self.scheduler
        if scheduler.max_num_batched_tokens is not None:
            return scheduler.max_num_batched_tokens
        if not self.speculation.num_speculative_tokens:
            return DEFAULT_BATCHED_TOKENS
        num_decodes = scheduler.max_num_seqs * (1 + self.speculation.num_speculative_tokens)
        of_prompts = scheduler.max_num_mixed_tokens // PROMPT_SHARE
        return max(DEFAULT_BATCHED_TOKENS, num_decodes + of_prompts)

    @classmethod
    def sections(cls) -> dict[str, type[ConfigSection]]:
        """Returns the class of each section, by its name here."""
        return {
            name: field.annotation
            for name, field in cls.model_fields.items()
            if isinstance(field.annotation, type)
        }

    @classmethod
    def from_flags(cls, **flags: Any) -> Self:
        """Returns the configuration with these values of flags and defaults for the others.

        Raises:
            ValidationError: a flag is unknown, or a value is out of bounds.
        """
        values: dict[str, Any] = {
            name: {flag: flags.pop(flag) for flag in section.model_fields if flag in flags}
            for name, section in cls.sections().items()
        }
        return cls.model_validate({**values, **flags})

    def with_flags(self, **changes: Any) -> Self:
        """Returns this configuration with other values of some flags.

        Raises:
            ValidationError: as for `from_flags`.
        """
        return self.from_flags(**{**self.flags(), **changes})

    def flags(self) -> dict[str, Any]:
        """Returns the value of each flag."""
        return {
            flag: value for section in self.sections() for flag, value in getattr(self, section)
        }

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        """Refuses texts that no message to a worker can hold, such as folders of another locale."""
        for flag, value in self.flags().items():
            try:
                f"{value}".encode()
            except UnicodeEncodeError:
                raise ValueError(
                    f"--{flag.replace('_', '-')} is {str(value)!r}: it has bytes that are not text"
                    f" in {sys.getfilesystemencoding()}; use another name, or set LC_ALL=C.UTF-8"
                ) from None
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        """Refuses a list of GPUs for a model on a CPU."""
        if self.parallel.devices is not None and self.worker.device == "cpu":
            raise ValueError("--devices lists GPUs, and --device is cpu")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        check_ports(
            {"--port": self.serving.port, "--metrics-port": self.observability.metrics_port}
        )
        return self

    @model_validator(mode="after")
    def _check_sleep(self) -> Self:
        """Refuses a start asleep that nothing could end."""
        if self.worker.start_asleep and not self.worker.enable_sleep:
            raise ValueError("--start-asleep needs --enable-sleep, which lets the engine wake")
        return self

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        """Refuses several hosts that would not know each other, or could not meet."""
        parallel, serving = self.parallel, self.serving
        if parallel.num_nodes == 1 or is_loopback(serving.host):
            return self
        if parallel.node_secret_file is None and serving.tls_client_ca is None:
            raise ValueError(
                f"--num-nodes is {parallel.num_nodes}: off loopback it needs --node-secret-file or "
                "--tls-client-ca, so that only hosts of yours can join"
            )
        if parallel.node_interface == LOOPBACK_INTERFACE:
            raise ValueError(
                f"--num-nodes is {parallel.num_nodes}: off loopback it needs --node-interface, on "
                "which other hosts reach this one"
            )
        return self

    @model_validator(mode="after")
    def _check_copies(self) -> Self:
        """Refuses copies of experts in batch-invariant mode."""
        num_copies = self.parallel.num_redundant_experts
        if num_copies and self.worker.batch_invariant:
            raise ValueError(
                f"--num-redundant-experts is {num_copies}: it must be 0 with --batch-invariant, as "
                "copies share tokens by their place in the batch"
            )
        return self

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        """Refuses memory for blocks that no request could find."""
        if self.cache.host_kv_gb and not self.cache.enable_prefix_caching:
            raise ValueError(
                f"--host-kv-gb is {self.cache.host_kv_gb:g}: it must be 0 without "
                "--enable-prefix-caching, which finds its blocks"
            )
        if self.cache.disk_kv_dir is None:
            return self
        if not self.cache.host_kv_gb:
            raise ValueError(
                "--disk-kv-dir needs --host-kv-gb: blocks go to disk through the host's memory"
            )
        if self.parallel.num_ranks > 1:
            raise ValueError(
                f"--disk-kv-dir needs an engine of one rank; this one has {self.parallel.num_ranks}"
            )
        return self

    @model_validator(mode="after")
    def _check_speculation(self) -> Self:
        """Refuses speculation with settings that do not allow it."""
        num_drafts = self.speculation.num_speculative_tokens
        if not num_drafts:
            return self
        if self.checkpoint.task != "generate":
            raise ValueError(
                f"--num-speculative-tokens is {num_drafts}: it must be 0 with --task "
                f"{self.checkpoint.task}, which generates no tokens"
            )
        if self.parallel.pipeline_parallel_size > 1:
            raise ValueError(
                f"--num-speculative-tokens is {num_drafts}: it must be 0 with "
                "--pipeline-parallel-size, as no stage but the last knows which drafts hold"
            )
        limits = {
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.cache.block_size,
            "max_model_len": self.checkpoint.max_model_len,
        }
        for name, limit in limits.items():
            if limit is not None and limit <= num_drafts:
                raise ValueError(
                    f"--num-speculative-tokens is {num_drafts}: it must be less than {name}, "
                    f"which is {limit}"
                )
        if self.compilation.cudagraph_capture_sizes == AUTO:
            raise ValueError(
                f"--num-speculative-tokens is {num_drafts}: it must be 0 with "
                "cudagraph_capture_sizes auto"
            )
        return self
