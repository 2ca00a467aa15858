"""The process that runs the model."""

from typing import Literal

from pydantic import Field

from services.engine.config.section import ConfigSection
from services.settings.flags import MAX_WAIT_S

MAX_THREADS = 1024
"""Of OpenMP, which crashes when the system has none left."""

GPU_STEP_TIMEOUT_S = 60.0
CPU_STEP_TIMEOUT_S = 600.0
"""2,048 tokens of a model with 8 billion parameters are 33 TFLOP; a core does 0.1 a second."""


class WorkerConfig(ConfigSection):
    """The worker: device, threads, and how long it may take."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; auto takes CUDA when there is a device."""
    num_threads: int = Field(default=1, ge=1, le=MAX_THREADS)
    """CPU threads of the model's operations; more than one hurts small models."""
    batch_invariant: bool = False
    """Give each row of logits the same bits whatever else is in its step; costs time."""
    gpu_tables: Literal["auto", "generic"] = "auto"
    """Kernels and tiles of a GPU: auto takes those measured on it, where there are any; generic
    those of GPUs that were not measured, to try them on one that was."""
    step_timeout_s: float | None = Field(default=None, gt=0, le=MAX_WAIT_S)
    """A step that takes longer means a hung worker, which is killed and started again; when absent,
    60 s on a GPU and 600 s on a CPU, where a chunk of a long prompt takes minutes."""
    worker_start_timeout_s: float = Field(default=600.0, gt=0, le=MAX_WAIT_S)
    """Longest time from starting a worker to its being ready."""
    worker_patience_s: float = Field(default=60.0, ge=0, le=MAX_WAIT_S)
    """Time that requests wait for a lost worker's successor; then they end with UNAVAILABLE."""

    enable_sleep: bool = False
    """Let operators put the engine to sleep (octavo sleep), which gives back the memory of weights
    and KV cache, and wake it."""
    start_asleep: bool = False
    """Start without a worker, as if asleep at level 2: the first wake loads the model. Needs
    --enable-sleep."""

    def step_limit_s(self, *, on_cpu: bool) -> float:
        """Returns the time after which a step means a hung worker."""
        if self.step_timeout_s is not None:
            return self.step_timeout_s
        return CPU_STEP_TIMEOUT_S if on_cpu else GPU_STEP_TIMEOUT_S
