"""Phi-3 and Phi-4: Llama whose checkpoint stores packed projections.

Some sizes rotate part of each head.
Source: Abdin et al. 2024, "Phi-3 Technical Report", section 2.
"""

from typing import ClassVar

from models.layers.decoder import CausalLM


class Phi3ForCausalLM(CausalLM):
    """Phi-3 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, ...]]] = {}
