"""Kimi Delta Attention: Gated DeltaNet whose every channel of the keys has a decay."""

from collections.abc import Collection

import torch

from models.config import ModelConfig
from models.config_sections.mixers import STATE
from models.layers.gated_delta_net import delta_net_config, delta_net_spec
from models.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from models.layers.rotary import Rotation
from models.layers.state_mixer import CausalConv, GatedRMSNorm, StateMixer
from models.layers.weight import empty_parameter
from models.ops.recurrence.gated_delta_net import gated_delta_net
from models.parallel.group import SINGLE, ParallelGroup


class KimiDeltaAttention(StateMixer):
    """Mixes tokens by the gated delta rule, after a short convolution; ranks share the heads.

    has_small_gates: whether decays and the output's gates are projected through few features.

    Source: Kimi Team 2025, "Kimi Linear", section 3.
    """

    splitting_op = "octavo::gated_delta_net"
    """The operator at which a model with this layer is cut into pieces."""

    def __init__(
        self,
        config: ModelConfig,
        layer_index: int,
        group: ParallelGroup,
        *,
        has_small_gates: bool,
    ) -> None:
        net = delta_net_config(config)
        num_heads = group.split(net.num_v_heads, "heads of a state")
        super().__init__(
            config.cache_index(layer_index, STATE),
            delta_net_spec(net, num_heads, num_heads),
            group,
        )
        self._net = net
        self._num_heads = num_heads
        hidden, size = config.hidden_size, net.num_v_heads * net.head_v_dim

        def column(input_size: int, *sizes: int) -> MergedColumnParallelLinear:
            return MergedColumnParallelLinear(input_size, sizes, bias=False, group=group)

        self.qkv_proj = column(hidden, size, size, size)
        self.b_proj = column(hidden, net.num_v_heads)
        self._has_small_gates = has_small_gates
        if has_small_gates:
            # Every rank computes all of it, as a group of one.
            self.fg_a_proj = MergedColumnParallelLinear(
                hidden, [net.head_v_dim] * 2, bias=False, group=SINGLE
            )
            self.f_b_proj = column(net.head_v_dim, size)
            self.g_b_proj = column(net.head_v_dim, size)
        else:
            self.fg_proj = column(hidden, size, size)
        self.conv1d = CausalConv([size] * 3, net.conv_width, bias=False, group=group)
        self.A_log = empty_parameter(num_heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(num_heads * net.head_k_dim, dtype=torch.float32)
        self.o_norm = GatedRMSNorm(net.head_v_dim, net.norm_eps, group, has_silu=False)
        self.o_proj = RowParallelLinear(size, hidden, bias=False, group=group)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        del rotation
        net, num_heads = self._net, self._num_heads
        decays, gate = self._gates(hidden)
        mixed = hidden.new_empty(len(hidden), num_heads, net.head_v_dim)
        gated_delta_net(
            self.qkv_proj(hidden), decays.view(len(hidden), num_heads, -1),
            self.b_proj(hidden), self.conv1d.weight, self.A_log, self.dt_bias, mixed,
            self.layer_index, num_heads, net.head_k_dim, net.beta_scale, net.decay_floor,
        )  # fmt: skip
        output: torch.Tensor = self.o_proj(self.o_norm(mixed.flatten(1), gate))
        return output

    def _gates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the gates of decays and of the output, [T, heads * D] each."""
        if not self._has_small_gates:
            decays, gate = self.fg_proj(hidden).chunk(2, dim=-1)
            return decays, gate
        small_decays, small_gate = self.fg_a_proj(hidden).chunk(2, dim=-1)
        return self.f_b_proj(small_decays), self.g_b_proj(small_gate)

    def expected_passes(self) -> Collection[str]:
        """Returns the compiler passes that must match something in the layer."""
        return ()
