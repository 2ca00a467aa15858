"""Metrics, traces and logs."""

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
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line that is logged."""
    log_format: Literal["auto", "console", "json"] = "auto"
    """How lines look; auto means console on a terminal and json elsewhere."""
