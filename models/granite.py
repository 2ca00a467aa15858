"""Granite: Llama whose token vectors, sub-layers' outputs, attention scores and logits are scaled.

Source: Granite Team 2024, "Granite 3.0 Language Models", section 2.
"""

from models.layers.decoder import CausalLM


class GraniteForCausalLM(CausalLM):
    """Granite with its language-model head."""
