"""Attention to blocks of keys that an index chooses, in config.json."""

from dataclasses import dataclass

from models.config_sections.families import FAMILIES_WITH_CHOSEN_BLOCKS
from models.config_sections.fields import Fields
from models.config_sections.head_sizes import HeadSizes
from models.config_sections.layer_types import CHOSEN_BLOCKS, read_layer_types

_DEFAULTS = {"block_size": 128, "topk_blocks": 16, "local_blocks": 1}
_RELEASED = {
    "n_heads": "sparse_num_index_heads",
    "head_dim": "sparse_index_dim",
    "block_size": "sparse_block_size",
    "topk_blocks": "sparse_topk_blocks",
    "local_blocks": "sparse_local_block",
}
"""End of a field's name after index_ -> its name in sparse_attention_config of released files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexConfig:
    """Sizes of the index that chooses blocks of keys for the queries of each kv head.

    The index has a head for each kv head, of the size of its keys.
    """

    block_size: int
    """Tokens of a block, which begins at a multiple of that."""
    top_blocks: int
    """Most blocks that a query attends to."""
    local_blocks: int
    """Last blocks, a query's own included, that are always among them."""
    layers: frozenset[int]
    """Layers with an index; others attend to all keys."""


def read_block_index(fields: Fields, num_layers: int, heads: HeadSizes) -> BlockIndexConfig | None:
    """Reads the index of blocks; None if no layer has one.

    Raises:
        ConfigError: a field is ill-typed, or asks for an unsupported index.
    """
    if fields.architecture() not in FAMILIES_WITH_CHOSEN_BLOCKS:
        return None
    _refuse_others(fields)
    types = read_layer_types(fields, num_layers) or ()
    layers = frozenset(layer for layer, kind in enumerate(types) if kind == CHOSEN_BLOCKS)
    if not layers:
        return None
    released = fields.section("sparse_attention_config")
    _refuse_other_indexes(released, layers)
    for end, wanted in (("n_heads", heads.num_kv_heads), ("head_dim", heads.head_dim)):
        section, name = _field(fields, released, end)
        if section.count(name, wanted) != wanted:
            what = "num_key_value_heads" if end == "n_heads" else "head_dim"
            raise section.error(name, f"{wanted}, as {what} is")
    sizes = {}
    for end, default in _DEFAULTS.items():
        section, name = _field(fields, released, end)
        sizes[end] = section.count(name, default, minimum=0 if end == "local_blocks" else 1)
    if sizes["local_blocks"] > sizes["topk_blocks"]:
        section, name = _field(fields, released, "local_blocks")
        raise section.error(name, f"at most the {sizes['topk_blocks']} blocks that are chosen")
    return BlockIndexConfig(
        block_size=sizes["block_size"],
        top_blocks=sizes["topk_blocks"],
        local_blocks=sizes["local_blocks"],
        layers=layers,
    )


def _field(fields: Fields, released: Fields, end: str) -> tuple[Fields, str]:
    """Returns the section and the name of a field; as in transformers, that of releases counts."""
    name = _RELEASED[end]
    return (released, name) if released.has(name) else (fields, f"index_{end}")


def _refuse_others(fields: Fields) -> None:
    """Raises ConfigError where a release would have another norm, router or shared expert."""
    for name in ("use_gemma_norm", "use_qk_norm", "use_routing_bias"):
        if not fields.flag(name, default=True):
            raise fields.error(name, "true")
    fields.choice("qk_norm_type", ("per_head",), "per_head")
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    if fields.count("n_shared_experts", 1) != 1:
        raise fields.error("n_shared_experts", "1")


def _refuse_other_indexes(released: Fields, layers: frozenset[int]) -> None:
    """Raises ConfigError where a release would score blocks otherwise, or attend to the index."""
    if not released.flag("use_sparse_attention", default=True):
        raise released.error("use_sparse_attention", "true where layers choose blocks")
    released.choice("sparse_score_type", ("max",), "max")
    if released.count("sparse_init_block", 0, minimum=0):
        raise released.error("sparse_init_block", "0")
    disabled = released.values.get("sparse_disable_index_value")
    if disabled is None or disabled is True:
        return
    is_list = isinstance(disabled, list) and len(disabled) > max(layers)
    if not is_list or not all(disabled[layer] for layer in layers):
        raise released.error(
            "sparse_disable_index_value", "true for every layer that chooses blocks"
        )
