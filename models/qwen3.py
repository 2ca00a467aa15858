"""Qwen3: Llama with each query and key head normalised before it is rotated.

Source: Yang et al. 2025, "Qwen3 Technical Report", section 2.
"""

from typing import ClassVar

from models.layers.decoder import CausalLM


class Qwen3ForCausalLM(CausalLM):
    """Qwen3 with its language-model head."""

    has_head_norms: ClassVar[bool] = True
