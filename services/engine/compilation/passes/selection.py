"""The compiler passes, in the order in which they run."""

from services.engine.compilation.passes.activation_quant import ActivationQuantPass
from services.engine.compilation.passes.all_reduce_norm import AllReduceNormPass
from services.engine.compilation.passes.attention_quant import AttentionQuantPass
from services.engine.compilation.passes.canonical.canonical_pass import CanonicalPass
from services.engine.compilation.passes.clean_up import CleanUpPass
from services.engine.compilation.passes.graph_pass import GraphPass
from services.engine.compilation.passes.linear_gate import LinearGatePass
from services.engine.compilation.passes.linear_residual import LinearResidualPass
from services.engine.compilation.passes.multi_stream import MultiStreamPass
from services.engine.compilation.passes.norm_linear import NormLinearPass, NormQuantPass
from services.engine.compilation.passes.packed_residual import PackedResidualPass
from services.engine.compilation.passes.qk_norm_rope_cache import QkNormRopeCachePass
from services.engine.compilation.passes.residual_norm import ResidualNormPass
from services.engine.config.compilation import CompilationConfig


def selected_passes(config: CompilationConfig) -> list[GraphPass]:
    """Returns the passes that a configuration selects, in order."""
    every: list[GraphPass] = [
        CanonicalPass(),
        LinearGatePass(),
        MultiStreamPass(config.max_num_streams),
        LinearResidualPass(),
        AllReduceNormPass(),
        ResidualNormPass(),
        NormLinearPass(),
        NormQuantPass(),
        PackedResidualPass(),
        ActivationQuantPass(),
        AttentionQuantPass(),
        QkNormRopeCachePass(),
        CleanUpPass(),
    ]
    return [each for each in every if each.name in config.selected_passes]
