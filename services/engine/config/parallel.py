"""The processes that share a model."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from services.engine.config.section import ConfigSection
from services.settings.flags import MAX_INT32, MAX_WAIT_S

MAX_RANKS = 64
LOOPBACK_INTERFACE = "lo"
DeviceNumber = Annotated[int, Field(ge=0, le=MAX_INT32)]
NumLayers = Annotated[int, Field(ge=1, le=MAX_INT32)]


class ParallelConfig(ConfigSection):
    """Several GPUs: how many processes share the model, and where each runs."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Processes, each with a GPU of its own, that hold a share of every layer."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Stages, each with as many processes as --tensor-parallel-size says, that hold consecutive
    layers; as many steps are on their way as there are stages."""
    pipeline_layers: list[NumLayers] | None = None
    """Numbers of layers of the stages; as equal as possible when absent."""
    data_parallel_size: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Groups of --tensor-parallel-size processes, each with requests and a KV cache of its own;
    all processes share the experts, which are whole."""
    devices: list[DeviceNumber] | None = None
    """Numbers of the GPUs to use, one for each process of a host; the first ones when absent."""
    all_reduce: Literal["auto", "nccl", "fused"] = "auto"
    """Sums over ranks and gathers of data-parallel ones: nccl; fused: kernels of our own, of sums
    with residual and norm; auto: fused if it works."""

    enable_expert_parallel: bool = False
    """Whether each process holds some whole experts of a model, not a share of every expert."""
    num_redundant_experts: int = Field(default=0, ge=0, le=MAX_INT32)
    """Second copies of experts in each layer; rounded up so that all processes hold equally
    many."""

    eplb_interval: int = Field(default=0, ge=0, le=MAX_INT32)
    """Steps after which experts move between processes, if that evens out their load; 0 for
    never."""

    num_nodes: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Hosts that run equally many processes; all but this one join by octavo worker-node."""
    node_interface: str = LOOPBACK_INTERFACE
    """Network interface of this host on which its processes meet those of other hosts."""
    node_secret_file: Path | None = None
    """File with a secret that hosts prove to each other when they join; 16 bytes or more."""
    node_silence_timeout_s: float = Field(default=10.0, gt=0, le=MAX_WAIT_S)
    """A host that sends nothing for this long is lost; each sends signs of life."""

    @property
    def num_ranks(self) -> int:
        """Processes that run the model together."""
        return self.pipeline_parallel_size * self.data_parallel_size * self.tensor_parallel_size

    @model_validator(mode="after")
    def _check_data_parallel(self) -> Self:
        """Refuses what data-parallel ranks do not do yet."""
        if self.data_parallel_size == 1:
            return self
        if self.pipeline_parallel_size > 1:
            raise ValueError(
                f"--data-parallel-size is {self.data_parallel_size}: it must be 1 with "
                f"--pipeline-parallel-size {self.pipeline_parallel_size}"
            )
        return self

    @property
    def ranks_per_node(self) -> int:
        """Processes of each host."""
        return self.num_ranks // self.num_nodes

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        """Refuses too many ranks, and layers for another number of stages."""
        if self.num_ranks > MAX_RANKS:
            raise ValueError(
                "--tensor-parallel-size times --pipeline-parallel-size times --data-parallel-size "
                f"is {self.num_ranks}: it must be at most {MAX_RANKS}"
            )
        layers = self.pipeline_layers
        if layers is not None and len(layers) != self.pipeline_parallel_size:
            raise ValueError(
                f"--pipeline-layers lists {len(layers)} stages, and --pipeline-parallel-size is "
                f"{self.pipeline_parallel_size}"
            )
        return self

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        """Refuses hosts without equally many processes."""
        if self.num_ranks % self.num_nodes:
            raise ValueError(
                f"--num-nodes is {self.num_nodes}: {self.num_ranks} processes cannot be shared "
                "equally by these hosts"
            )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        """Refuses settings of whole experts where no process holds some."""
        has_experts = self.enable_expert_parallel and self.tensor_parallel_size > 1
        has_experts |= self.data_parallel_size > 1
        for name in ("num_redundant_experts", "eplb_interval"):
            if getattr(self, name) and not has_experts:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be 0 without "
                    "--enable-expert-parallel and several processes, or --data-parallel-size"
                )
        if self.eplb_interval and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"--eplb-interval is {self.eplb_interval}: it must be 0 with "
                f"--pipeline-parallel-size {self.pipeline_parallel_size}"
            )
        return self

    @model_validator(mode="after")
    def _check_all_reduce(self) -> Self:
        """Refuses our own kernels where ranks are several groups."""
        names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        sizes = [
            f"--{name.replace('_', '-')} {getattr(self, name)}"
            for name in names
            if getattr(self, name) > 1
        ]
        if self.all_reduce == "fused" and len(sizes) > 1:
            raise ValueError(
                f"--all-reduce is fused: it must be auto or nccl with {' and '.join(sizes)}, as "
                "its memory is that of one group of all ranks"
            )
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        """Refuses a list of GPUs that does not give each process its own."""
        devices = self.devices
        if devices is None:
            return self
        if len(devices) != self.ranks_per_node:
            names = ("data_parallel_size", "pipeline_parallel_size")
            times = "".join(
                f" times --{name.replace('_', '-')} {getattr(self, name)}"
                for name in names
                if getattr(self, name) > 1
            )
            times += f", on --num-nodes {self.num_nodes}" if self.num_nodes > 1 else ""
            raise ValueError(
                f"--devices lists {len(devices)} GPUs, and --tensor-parallel-size is "
                f"{self.tensor_parallel_size}{times}"
            )
        if len(set(devices)) < len(devices):
            raise ValueError("--devices lists a GPU twice")
        return self
