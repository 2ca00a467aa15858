"""Names of the kinds of a model's layers, in config.json."""

from models.config_sections.families import (
    FAMILIES_WITH_CHOSEN_BLOCKS,
    FAMILIES_WITH_CHUNKS,
    FAMILIES_WITH_COMPRESSION,
    FAMILIES_WITH_STATES,
)
from models.config_sections.fields import Fields

ATTENTION_TYPES = (
    "full_attention",
    "sliding_attention",
    "indexed_attention",
    "deepseek_sparse_attention",  # name of indexed_attention in transformers 5.17
)
CHUNKED = "chunked_attention"
CHOSEN_BLOCKS = "minimax_m3_sparse"
"""Blocks of keys that an index chooses."""
SPARSE_COMPRESSED = "compressed_sparse_attention"
"""Recent keys, and compressed ones that an index chooses."""
HEAVILY_COMPRESSED = "heavily_compressed_attention"
"""Recent keys, and all compressed ones."""
STATE_TYPES = ("linear_attention", "mamba", "conv")
HYBRID = "hybrid"
"""Attention and a state side by side."""
FEED_FORWARD_TYPES = ("mlp", "moe")
"""Layers that mix no tokens."""

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of hybrid_override_pattern."""


def read_layer_types(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    """Returns the name of each layer's kind; None if config.json names none.

    Raises:
        ConfigError: a name is unknown or of layers that the family lacks, or one is missing.
    """
    has_states = fields.architecture() in FAMILIES_WITH_STATES
    types = fields.values.get("layer_types")
    if types is None and fields.architecture() == "MiMoV2FlashForCausalLM":
        return _types_of_mimo(fields, num_layers)
    if types is None and fields.architecture() in FAMILIES_WITH_COMPRESSION:
        return _compressed_types(fields, num_layers)
    if types is None and fields.architecture() in FAMILIES_WITH_CHOSEN_BLOCKS:
        return _types_of_chosen_blocks(fields, num_layers)
    if types is None:
        return _implied_types(fields, num_layers) if has_states else None
    known: tuple[str, ...] = ATTENTION_TYPES
    if fields.architecture() in FAMILIES_WITH_CHUNKS:
        known = ("full_attention", CHUNKED)
    if fields.architecture() in FAMILIES_WITH_CHOSEN_BLOCKS:
        known = ("full_attention", CHOSEN_BLOCKS)
    if fields.architecture() in FAMILIES_WITH_COMPRESSION:
        known = ("sliding_attention", SPARSE_COMPRESSED, HEAVILY_COMPRESSED)
    if has_states:
        known = (*ATTENTION_TYPES, "attention", *STATE_TYPES, HYBRID, *FEED_FORWARD_TYPES)
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or any(kind not in known for kind in types):
        raise fields.error("layer_types", f"one of {', '.join(known)} for every layer")
    return tuple(types)


def count_layers(fields: Fields) -> int:
    """Returns the number of layers, which Nemotron-H says by the list of their kinds.

    Raises:
        ConfigError: it is missing or ill-typed.
    """
    if fields.architecture() == "NemotronHForCausalLM":
        for name in ("layer_types", "hybrid_override_pattern"):
            if fields.has(name):
                kinds = fields.values[name]
                sized = {"num_hidden_layers": len(kinds) if isinstance(kinds, list | str) else 0}
                return Fields(fields.file, sized, fields.prefix).count("num_hidden_layers")
    return fields.count("num_hidden_layers")


def count_draft_layers(fields: Fields) -> int:
    """Returns the number of layers after the last one that guess tokens ahead.

    Nemotron-H's have a part of attention and one of experts; there are none of others here. Of
    MiMo-V2's, which files need not count, and Hy4's, which they may count one more, the first is
    used.

    Raises:
        ConfigError: it is ill-typed.
    """
    name = "mtp_num_hidden_layers"
    if not fields.has(name):
        name = "num_nextn_predict_layers"
    kinds = fields.values.get("mtp_hybrid_override_pattern", "*E")
    kinds = fields.values.get("mtp_layers_block_type", kinds)
    is_known = kinds in ("*E", ["full_attention", "moe"])
    number = fields.count(name, 0, minimum=0) if is_known else 0
    has_one = fields.architecture() in ("HYV4ForCausalLM", "MiMoV2FlashForCausalLM")
    return min(number, 1) if has_one else number


def _pattern_types(fields: Fields) -> tuple[str, ...]:
    """Reads the kinds of layers from the letters of hybrid_override_pattern."""
    pattern = fields.values["hybrid_override_pattern"]
    if not isinstance(pattern, str) or set(pattern) - _PATTERN.keys():
        raise fields.error("hybrid_override_pattern", f"letters of {''.join(_PATTERN)}")
    return tuple(_PATTERN[letter] for letter in pattern)


def _types_of_mimo(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns the kinds of MiMo's layers: by hybrid_layer_pattern, or one of six without a window.

    The first layer has none either.
    """
    slides = [int(layer > 0 and (layer + 1) % 6 > 0) for layer in range(num_layers)]
    pattern = fields.values.get("hybrid_layer_pattern", slides)
    is_list = isinstance(pattern, list) and len(pattern) == num_layers
    if not is_list or any(each not in (0, 1) for each in pattern):
        raise fields.error("hybrid_layer_pattern", "0 or 1 for every layer; 1 has a window")
    return tuple("sliding_attention" if each else "full_attention" for each in pattern)


def _types_of_chosen_blocks(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns the kinds of layers by sparse_attention_freq; without it none chooses blocks."""
    section = fields.section("sparse_attention_config")
    if not section.has("sparse_attention_freq"):
        return ("full_attention",) * num_layers
    chooses = section.values["sparse_attention_freq"]
    is_list = isinstance(chooses, list) and len(chooses) == num_layers
    if not is_list or any(each not in (0, 1) for each in chooses):
        raise section.error("sparse_attention_freq", "0 or 1 for every layer; 1 chooses blocks")
    return tuple(CHOSEN_BLOCKS if each else "full_attention" for each in chooses)


def _compressed_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns the kinds of DeepSeek V4's layers by compress_ratios, which draft layers may follow.

    Without them the first two compress heavily, and after these every other one does.
    """
    if not fields.has("compress_ratios"):
        later = (HEAVILY_COMPRESSED, SPARSE_COMPRESSED) * num_layers
        return (HEAVILY_COMPRESSED, HEAVILY_COMPRESSED, *later)[:num_layers]
    kinds = {0: "sliding_attention", 4: SPARSE_COMPRESSED, 128: HEAVILY_COMPRESSED}
    ratios = fields.values["compress_ratios"]
    is_list = isinstance(ratios, list) and len(ratios) >= num_layers
    if not is_list or any(type(ratio) is not int or ratio not in kinds for ratio in ratios):
        raise fields.error("compress_ratios", "0, 4 or 128 for every layer")
    return tuple(kinds[ratio] for ratio in ratios[:num_layers])


def _implied_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Returns the kinds of layers of a family with states whose file does not list them."""
    layers = range(num_layers)
    if fields.architecture() == "FalconH1ForCausalLM":
        return (HYBRID,) * num_layers
    if fields.has("hybrid_override_pattern"):
        return _pattern_types(fields)
    if fields.has("full_attn_idxs"):
        attends = set(fields.layer_numbers("full_attn_idxs"))
    elif fields.section("linear_attn_config").has("full_attn_layers"):
        numbers = fields.section("linear_attn_config").layer_numbers("full_attn_layers")
        attends = {number - 1 for number in numbers}  # they count from 1
    elif fields.has("full_attention_interval"):
        every = fields.count("full_attention_interval")
        attends = {layer for layer in layers if (layer + 1) % every == 0}
    elif fields.architecture() == "MiniMaxForCausalLM":
        attends = set(layers[::2])
    elif fields.architecture() == "KimiLinearForCausalLM":
        attends = set(layers[4::4])
    elif fields.has("layer_group_size"):
        every = fields.count("layer_group_size")
        attends = {layer for layer in layers if (layer + 1) % every == 0}
    else:
        attends = set()
    return tuple("full_attention" if layer in attends else "linear_attention" for layer in layers)
