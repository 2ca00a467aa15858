"""Dense feed-forward layers of families in which they clamp gate and up as experts do."""

import torch

from models.batch_invariance import is_batch_invariant
from models.config import ModelConfig
from models.layers.gated_mlp import GatedMLP
from models.ops.elementwise.sigmoid_gate import sigmoid_gate
from models.parallel.group import ParallelGroup


class ClampedMLP(GatedMLP):
    """A dense feed-forward layer with the gate of the model's experts.

    Gate and up are clamped; see ExpertWeights.activate.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: ParallelGroup,
        *,
        intermediate_size: int,
        is_reduced: bool = True,
    ) -> None:
        super().__init__(config, group, intermediate_size=intermediate_size, is_reduced=is_reduced)
        moe = config.moe
        assert moe is not None, "the caller checked it"
        assert moe.swiglu_limit is not None, "the caller checked it"
        self._alpha, self._limit = moe.swiglu_alpha, moe.swiglu_limit
        self._adds_one = moe.adds_one

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps [T, hidden] to [T, hidden]."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        if is_batch_invariant():
            turned = sigmoid_gate(gate, self._alpha * gate)
        else:  # what compilers join
            turned = gate * torch.sigmoid(self._alpha * gate)
        inner = turned * (up + 1 if self._adds_one else up)
        output: torch.Tensor = self.down_proj(inner)
        return output

    @property
    def fuses_gate(self) -> bool:
        """Whether the product and the gate may be one kernel."""
        return False

    def expected_passes(self) -> tuple[str, ...]:
        """Returns none: the compiler fuses the clamped gate by itself."""
        return ()


def dense_mlp(
    config: ModelConfig, group: ParallelGroup, intermediate_size: int, *, is_reduced: bool = True
) -> GatedMLP:
    """Returns a dense or shared layer of a model, clamped as its experts where the family's are.

    Without `is_reduced`, each rank gets a part whose sum over the ranks is the output.
    """
    is_clamped = config.moe is not None and config.moe.clamps_all
    make = ClampedMLP if is_clamped else GatedMLP
    return make(config, group, intermediate_size=intermediate_size, is_reduced=is_reduced)
