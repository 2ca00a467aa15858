"""Names of the kinds of a model's layers, in config.json."""

from models.config_sections.families import FAMILIES_WITH_STATES
from models.config_sections.fields import Fields

ATTENTION_TYPES = (
    "full_attention",
    "sliding_attention",
    "indexed_attention",
    "deepseek_sparse_attention",  # name of indexed_attention in transformers 5.17
)
STATE_TYPES = ("linear_attention",)


def read_layer_types(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    """Returns the name of each layer's kind; None if config.json names none.

    Raises:
        ConfigError: a name is unknown or of layers that the family lacks, or one is missing.
    """
    has_states = fields.architecture() in FAMILIES_WITH_STATES
    types = fields.values.get("layer_types")
    if types is None:
        if not has_states or not fields.has("full_attention_interval"):
            return None
        every = fields.count("full_attention_interval")
        return tuple(
            "linear_attention" if (layer + 1) % every else "full_attention"
            for layer in range(num_layers)
        )
    known = ATTENTION_TYPES + (STATE_TYPES if has_states else ())
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or any(kind not in known for kind in types):
        raise fields.error("layer_types", f"one of {', '.join(known)} for every layer")
    return tuple(types)
