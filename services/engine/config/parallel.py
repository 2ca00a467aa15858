"""The processes that share a model."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from services.engine.config.section import ConfigSection

MAX_RANKS = 64
DeviceNumber = Annotated[int, Field(ge=0)]


class ParallelConfig(ConfigSection):
    """Several GPUs: how many processes share the model, and where each runs."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Processes, each with a GPU of its own, that hold a share of every layer."""
    devices: list[DeviceNumber] | None = None
    """Numbers of the GPUs to use, one for each process; the first ones when absent."""
    all_reduce: Literal["auto", "nccl", "fused"] = "auto"
    """Sums over ranks: nccl; fused: one kernel with residual and norm; auto: fused if it works."""

    @property
    def num_ranks(self) -> int:
        """Processes that run the model together."""
        return self.tensor_parallel_size

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        """Refuses a list of GPUs that does not give each process its own."""
        devices = self.devices
        if devices is None:
            return self
        if len(devices) != self.num_ranks:
            raise ValueError(
                f"--devices lists {len(devices)} GPUs, and --tensor-parallel-size is "
                f"{self.tensor_parallel_size}"
            )
        if len(set(devices)) < len(devices):
            raise ValueError("--devices lists a GPU twice")
        return self
