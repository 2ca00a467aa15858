"""Mamba 2: a state space of each head, whose parameters each token chooses."""

from collections.abc import Collection

import torch

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.config_sections.recurrence import Mamba2Config
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.layers.rotary import Rotation
from models.layers.state_mixer import CausalConv, GatedRMSNorm, StateMixer
from models.layers.weight import empty_parameter
from models.ops.elementwise.silu_and_mul import silu_and_mul
from models.ops.recurrence.mamba2 import mamba2
from models.parallel.group import ParallelGroup
from models.state_cache import StateSpec


class Mamba2(StateMixer):
    """Mixes tokens by state spaces, after a short convolution; ranks share the heads.

    With fewer groups of heads than ranks, ranks hold the same vectors that write and read states.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 7.
    """

    splitting_op = "octavo::mamba2"
    """The operator at which a model with this layer is cut into pieces."""

    def __init__(self, config: ModelConfig, layer_index: int, group: ParallelGroup) -> None:
        mamba = mamba2_config(config)
        replicas = max(1, group.size // mamba.num_groups)
        self._num_heads = group.split(mamba.num_heads, "heads of a state")
        self._num_groups = group.split(mamba.num_groups, "groups of heads", replicas=replicas)
        hidden, inner = config.hidden_size, mamba.num_heads * mamba.head_dim
        group_size = mamba.num_groups * mamba.state_size
        local_size = self._num_heads * mamba.head_dim
        super().__init__(
            config.cache_index(layer_index, STATE),
            StateSpec(
                num_heads=self._num_heads,
                head_rows=mamba.head_dim,
                head_columns=mamba.state_size,
                dtype=getattr(torch, mamba.state_dtype),
                conv_channels=local_size + 2 * self._num_groups * mamba.state_size,
                conv_width=mamba.conv_width,
                conv_dtype=torch.get_default_dtype(),
            ),
            group,
        )
        self._mamba = mamba
        self._sizes = [local_size, self.cache_spec.conv_channels, self._num_heads]
        self.in_proj = MergedColumnParallelLinear(
            hidden, [inner, inner, group_size, group_size, mamba.num_heads],
            replicas=[1, 1, replicas, replicas, 1], bias=mamba.has_input_bias, group=group,
        )  # fmt: skip
        self.conv1d = CausalConv(
            [inner, group_size, group_size], mamba.conv_width,
            replicas=[1, replicas, replicas], bias=mamba.has_conv_bias, group=group,
        )  # fmt: skip
        self.A_log = empty_parameter(self._num_heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(self._num_heads, dtype=torch.float32)
        self.D = empty_parameter(self._num_heads, dtype=torch.float32)
        self.norm: GatedRMSNorm | None = None
        if mamba.has_norm:
            self.norm = GatedRMSNorm(
                inner // mamba.num_groups, config.rms_norm_eps, group,
                num_groups=mamba.num_groups, gates_first=not mamba.norm_before_gate,
            )  # fmt: skip
        self.o_proj = RowParallelLinear(inner, hidden, bias=mamba.has_output_bias, group=group)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        del rotation
        mamba = self._mamba
        gate, xbc, dt = self.projected(hidden).split_with_sizes(self._sizes, dim=-1)
        mixed = hidden.new_empty(len(hidden), self._num_heads, mamba.head_dim)
        mamba2(
            xbc, dt, self.conv1d.weight, self.conv1d.bias, self.A_log, self.dt_bias, self.D, mixed,
            self.layer_index, self._num_groups, mamba.state_size, mamba.dt_min, mamba.dt_max,
        )  # fmt: skip
        values = mixed.flatten(1)
        if self.norm is None:
            gated = silu_and_mul(torch.cat((gate, values), dim=-1))
        else:
            gated = self.norm(values, gate)
        output: torch.Tensor = self.o_proj(gated)
        return output

    def projected(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to gates, convolved inputs and time steps, [T, sum of their sizes]."""
        projected: torch.Tensor = self.in_proj(hidden)
        return projected

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        return ()


def mamba2_config(config: ModelConfig) -> Mamba2Config:
    """Returns the sizes of a config's layers of Mamba 2.

    Raises:
        ValueError: it has none.
    """
    if config.mamba2 is None:
        raise ValueError(f"{config.architecture} needs layers of Mamba 2")
    return config.mamba2
