"""Heads of attention in config.json, which layers with a window may have others of."""

from dataclasses import dataclass

from models.config_sections.fields import Fields
from models.config_sections.gemma4 import GEMMA_4, read_global_heads
from models.config_sections.head_sizes import HeadSizes

MIMO_V2 = "MiMoV2FlashForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueConfig:
    """Values of heads that are shorter than the keys.

    head_dim: elements of a value. scale: factor of values.
    """

    head_dim: int
    scale: float


def read_heads(
    fields: Fields, head_dim: int, num_heads: int, num_kv_heads: int
) -> tuple[HeadSizes, HeadSizes | None]:
    """Returns the sizes of heads, and of those of layers with a window, if these differ.

    head_dim, num_kv_heads: of the fields of these names.

    Raises:
        ConfigError: a field is ill-typed, or heads cannot be shared.
    """
    heads, local = HeadSizes(head_dim=head_dim, num_kv_heads=num_kv_heads), None
    if fields.architecture() in GEMMA_4:
        heads, local = read_global_heads(fields), heads
    elif fields.architecture() == MIMO_V2:
        for name, size in (("swa_head_dim", head_dim), ("swa_num_attention_heads", num_heads)):
            if fields.count(name, size) != size:
                raise fields.error(name, f"{size}, as in other layers")
        count = fields.count("swa_num_key_value_heads", 2 * num_kv_heads)
        local = HeadSizes(head_dim=head_dim, num_kv_heads=count)
    for each in (heads, local or heads):
        if num_heads % each.num_kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of {num_heads} heads")
    return heads, local


def read_values(fields: Fields, head_dim: int) -> ValueConfig | None:
    """Reads the values of MiMo-V2; None of other families, whose values are as long as keys.

    Raises:
        ConfigError: a field is ill-typed, or values are longer than keys.
    """
    if fields.architecture() != MIMO_V2:
        return None
    size = fields.count("v_head_dim")
    if size > head_dim or fields.count("swa_v_head_dim", size) != size:
        raise fields.error("v_head_dim", f"at most {head_dim}, and equal in all layers")
    if fields.flag("add_full_attention_sink_bias"):
        raise fields.error("add_full_attention_sink_bias", "false")
    return ValueConfig(head_dim=size, scale=fields.number("attention_value_scale", 1.0))


def read_head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    """Returns the size of one head: the given one, or an equal share of the hidden size."""
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error("head_dim", f"given, as {num_heads} heads do not divide {hidden_size}")
    head_dim = fields.count("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", "even, as rotary embedding turns pairs")
    return head_dim


def has_output_bias(fields: Fields) -> bool:
    """Whether the last projection of attention has a bias; by default if the others have."""
    by_default = any(fields.flag(name) for name in ("attention_bias", "bias", "use_bias"))
    return fields.flag("attention_out_bias", default=by_default)
