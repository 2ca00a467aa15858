"""Tensors of a checkpoint that a GGUF file has in parts, or with two dimensions exchanged."""

from dataclasses import dataclass
from typing import Literal

Layout = Literal["key_value_heads", "gate_up", "transposed"]
"""How parts become one tensor:

- key_value_heads: [H, R, N] and [H, V, R] become [H * (N + V), R], the rows of each head together.
- gate_up: [E, I, K] twice becomes [E, K, 2 * I], the two taking turns; biases likewise, [E, 2 * I].
- transposed: [E, K, I] becomes [E, I, K]; biases stay.
"""


@dataclass(frozen=True, slots=True)
class Join:
    """A tensor, by the part of its name in GGUF that the first part has."""

    name: str
    """In the checkpoint's layer; biases end in _bias."""
    layout: Layout
    second: str | None = None
    """The second part's name in GGUF."""
    is_module: bool = False
    """Whether the name is that of a module with a weight."""

    def stored_name(self, kind: str) -> str:
        """Returns the tensor's name; kind: weight or bias."""
        if self.is_module:
            return f"{self.name}.{kind}"
        return self.name if kind == "weight" else f"{self.name}_bias"


JOINS = {
    "deepseek2": {
        "attn_k_b": Join("self_attn.kv_b_proj", "key_value_heads", "attn_v_b", is_module=True),
    },
    "gpt-oss": {
        "ffn_gate_exps": Join("mlp.experts.gate_up_proj", "gate_up", "ffn_up_exps"),
        "ffn_down_exps": Join("mlp.experts.down_proj", "transposed"),
    },
}
"""Architecture -> name of the first part -> what it is a part of."""
