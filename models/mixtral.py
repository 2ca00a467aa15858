"""Mixtral: Llama whose feed-forward layers are eight experts, two of them for each token.

Source: Jiang et al. 2024, "Mixtral of Experts", section 2.
"""

from typing import ClassVar

from models.layers.decoder import CausalLM


class MixtralForCausalLM(CausalLM):
    """Mixtral with its language-model head."""

    weights_mapping: ClassVar[dict[str, str]] = {".block_sparse_moe.": ".mlp."}
    expert_names: ClassVar[tuple[str, str, str]] = ("w1", "w3", "w2")
