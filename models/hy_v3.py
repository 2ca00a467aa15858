"""Hunyuan Hy3: normalised heads, and experts chosen by sigmoid scores beside a shared one.

Source: transformers 5.23, models/hy_v3.
"""

from typing import ClassVar

from models.layers.decoder import CausalLM


class HYV3ForCausalLM(CausalLM):
    """Hy3 with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {
        ".mlp.router.gate.": ".mlp.gate.",
        ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        ".mlp.shared_mlp.": ".mlp.shared_experts.",
    }

    has_head_norms: ClassVar[bool] = True
