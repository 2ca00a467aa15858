"""Metrics, traces and logs."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.engine.config.section import ConfigSection
from services.telemetry.tracing import OtlpEndpoint


class ObservabilityConfig(ConfigSection):
    """Metrics, traces and logs."""

    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port that answers with metrics for Prometheus; 0 takes a free one; none when absent."""
    otlp_endpoint: OtlpEndpoint | None = None
    """Collector that gets traces over OTLP/gRPC, as http://host:4317; no traces when absent."""
    profile_dir: Path | None = None
    """Folder of traces; without it StartProfile is refused."""
    profile_max_s: float = Field(default=60.0, gt=0, le=3600)
    """Longest profile."""
    profile_max_mb: int = Field(default=512, ge=1, le=2048)
    """Memory that a profile may take in the worker; it ends there."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line that is logged."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """How lines look; auto means console on a terminal and json elsewhere."""
