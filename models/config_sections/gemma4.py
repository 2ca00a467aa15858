"""Gemma 4's own parts in config.json."""

from dataclasses import dataclass

from models.config_sections.fields import Fields
from models.config_sections.head_sizes import HeadSizes

GEMMA_4 = ("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Config:
    """Parts that no other family has.

    values_are_keys: whether layers without a window project to keys alone, which are values, too.
    num_sharing_layers: last layers, which attend to the cache of an earlier one of their kind.
    sharing_scale: factor of these layers' inner size.
    token_size: elements of each token's embedding for each layer; 0 for none.
    token_vocab_size: tokens that have one.
    pad_token_id: the token whose embeddings for each layer image tokens have.
    """

    values_are_keys: bool
    num_sharing_layers: int
    sharing_scale: int
    token_size: int
    token_vocab_size: int
    pad_token_id: int


def read_gemma4(fields: Fields, num_layers: int) -> Gemma4Config | None:
    """Reads the parts of Gemma 4; None of another family.

    Raises:
        ConfigError: a field is ill-typed, or all layers would share.
    """
    if fields.architecture() not in GEMMA_4:
        return None
    num_sharing = fields.count("num_kv_shared_layers", 0, minimum=0)
    if num_sharing >= num_layers:
        raise fields.error("num_kv_shared_layers", f"less than the {num_layers} layers")
    return Gemma4Config(
        values_are_keys=fields.flag("attention_k_eq_v"),
        num_sharing_layers=num_sharing,
        sharing_scale=2 if fields.flag("use_double_wide_mlp") else 1,
        token_size=fields.count("hidden_size_per_layer_input", 0, minimum=0),
        token_vocab_size=fields.count("vocab_size_per_layer_input"),
        pad_token_id=fields.count("pad_token_id", 0, minimum=0),
    )


def read_global_heads(fields: Fields) -> HeadSizes:
    """Reads the heads of layers without a window, from fields or from those of single layers.

    Raises:
        ConfigError: a field is ill-typed, or such layers differ.
    """
    head_dim = fields.count("global_head_dim", 512)
    num_kv_heads = fields.count("num_key_value_heads")
    if fields.flag("attention_k_eq_v"):
        num_kv_heads = fields.count("num_global_key_value_heads", num_kv_heads)
    layers = fields.section("per_layer_config")
    sections = [layers.section(name) for name in layers.values]
    if any(section.values != sections[0].values for section in sections):
        raise fields.error("per_layer_config", "equal for all of its layers")
    if sections:
        head_dim = sections[0].count("head_dim", fields.count("head_dim"))
        num_kv_heads = sections[0].count("num_key_value_heads", fields.count("num_key_value_heads"))
    if head_dim % 2:
        raise fields.error("global_head_dim", "even, as rotary embedding turns pairs")
    return HeadSizes(head_dim=head_dim, num_kv_heads=num_kv_heads)
