"""Gated DeltaNet: linear attention whose state forgets by a gate and corrects its values."""

from collections.abc import Collection, Sequence

import torch

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.config_sections.recurrence import DeltaNetConfig
from models.layers.linear import RowParallelLinear
from models.layers.rotary import Rotation
from models.layers.state_mixer import CausalConv, GatedRMSNorm, JoinedColumnLinear, StateMixer
from models.layers.weight import empty_parameter
from models.ops.recurrence.gated_delta_net import gated_delta_net
from models.parallel.group import ParallelGroup
from models.state_cache import StateSpec


class GatedDeltaNet(StateMixer):
    """Mixes tokens by the gated delta rule, after a short convolution; ranks share the heads.

    stored: queries, keys, values and gates, 0 to 3, that each of a checkpoint's tensors holds.
    is_interleaved: whether a checkpoint stores the rows of all of them by heads of keys.

    Source: Yang et al. 2024, "Gated Delta Networks", section 3.
    """

    splitting_op = "octavo::gated_delta_net"
    """The operator at which a model with this layer is cut into pieces."""

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        group: ParallelGroup,
        *,
        stored: Sequence[Sequence[int]] = ((0, 1, 2), (3,)),
        is_interleaved: bool = False,
    ) -> None:
        net = delta_net_config(config)
        self._num_k_heads = group.split(net.num_k_heads, "key heads of a state")
        self._num_v_heads = group.split(net.num_v_heads, "heads of a state")
        super().__init__(
            config.cache_index(layer_index, STATE),
            delta_net_spec(net, self._num_k_heads, self._num_v_heads),
            group,
        )
        self._net = net
        hidden = config.hidden_size
        k_size, v_size = net.num_k_heads * net.head_k_dim, net.num_v_heads * net.head_v_dim
        interleaved = net.num_k_heads if is_interleaved else 0
        self.in_proj_qkvz = JoinedColumnLinear(
            hidden, [k_size, k_size, v_size, v_size],
            stored=((0, 1, 2, 3),) if is_interleaved else stored,
            num_interleaved=interleaved, group=group,
        )  # fmt: skip
        self.in_proj_ba = JoinedColumnLinear(
            hidden, [net.num_v_heads] * 2, stored=((0, 1),) if is_interleaved else ((0,), (1,)),
            num_interleaved=interleaved, group=group,
        )  # fmt: skip
        self.conv1d = CausalConv([k_size, k_size, v_size], net.conv_width, bias=False, group=group)
        self.A_log = empty_parameter(self._num_v_heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(self._num_v_heads, dtype=torch.float32)
        self.norm = GatedRMSNorm(net.head_v_dim, net.norm_eps, group)
        self.o_proj = RowParallelLinear(v_size, hidden, bias=False, group=group)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        del rotation
        net, num_heads = self._net, self._num_v_heads
        size = num_heads * net.head_v_dim
        # The small product first: the large one reads its weights meanwhile.
        gates, projected = self.in_proj_ba(hidden), self.in_proj_qkvz(hidden)
        mixed = projected.new_empty(len(hidden), num_heads, net.head_v_dim)
        gated_delta_net(
            projected[:, :-size], gates[:, num_heads:], gates[:, :num_heads], self.conv1d.weight,
            self.A_log, self.dt_bias, mixed, self.layer_index, self._num_k_heads, net.head_k_dim,
            net.beta_scale,
        )  # fmt: skip
        output: torch.Tensor = self.o_proj(self.norm(mixed.flatten(1), projected[:, -size:]))
        return output

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        return ()


def delta_net_config(config: ModelConfig) -> DeltaNetConfig:
    """Returns the sizes of a config's layers of Gated DeltaNet.

    Raises:
        ValueError: it has none.
    """
    if config.delta_net is None:
        raise ValueError(f"{config.architecture} needs layers of Gated DeltaNet")
    return config.delta_net


def delta_net_spec(net: DeltaNetConfig, num_k_heads: int, num_v_heads: int) -> StateSpec:
    """Returns the state of a rank with some of the heads."""
    return StateSpec(
        num_heads=num_v_heads,
        head_rows=net.head_k_dim,
        head_columns=net.head_v_dim,
        dtype=getattr(torch, net.state_dtype),
        conv_channels=2 * num_k_heads * net.head_k_dim + num_v_heads * net.head_v_dim,
        conv_width=net.conv_width,
        conv_dtype=torch.get_default_dtype(),
    )
