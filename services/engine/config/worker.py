"""The process that runs the model."""

from typing import Literal

from pydantic import Field

from services.engine.config.section import ConfigSection


class WorkerConfig(ConfigSection):
    """The worker: device, threads, and how long it may take."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes CUDA when there is a device."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of the model's operations; more than one hurts small models."""
    batch_invariant: bool = False
    """Give each row of logits the same bits whatever else is in its step; costs time."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """A step that takes longer means a hung worker, which is killed and started again."""
    worker_start_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time from starting a worker to its being ready."""
    worker_patience_s: float = Field(default=60.0, ge=0)
    """Time that requests wait for a lost worker's successor; then they end with UNAVAILABLE."""
