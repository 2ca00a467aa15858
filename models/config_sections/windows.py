"""Which keys a layer's queries see, and whether they have positions, in config.json."""

from collections.abc import Sequence

from models.config_sections.families import (
    FAMILIES_WITH_CHUNKS,
    FAMILIES_WITH_LOCAL_DRAFTS,
    FAMILIES_WITHOUT_POSITIONS,
    FAMILIES_WITHOUT_WINDOWS,
)
from models.config_sections.fields import Fields
from models.config_sections.gemma4 import GEMMA_4
from models.config_sections.layer_types import CHUNKED, read_layer_types


def sees_later(fields: Fields) -> bool:
    """Whether the queries of a model see the keys of later tokens, too.

    Raises:
        ConfigError: they do by is_causal, which models of vectors may have and no layer here knows.
    """
    if fields.values.get("is_causal") is False:
        raise fields.error("is_causal", "true; later tokens are seen in Gemma 3 alone")
    return fields.values.get("use_bidirectional_attention") is True


def read_sliding_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window: by layer_types, by the pattern, or one for all.

    Chunks of n positions are -n: see `Window` of models.config_sections.mixers.
    """
    layer_types = read_layer_types(fields, num_layers)
    if fields.architecture() in FAMILIES_WITH_CHUNKS:
        return _read_chunks(fields, num_layers, layer_types)
    if fields.architecture() == "MiniMaxForCausalLM":
        is_sliding = [fields.has("sliding_window")] * num_layers
    elif layer_types is not None:
        is_sliding = [kind == "sliding_attention" for kind in layer_types]
        if fields.architecture() in GEMMA_4:
            is_sliding[-1] = False
    elif fields.architecture() in FAMILIES_WITHOUT_WINDOWS:
        is_sliding = [False] * num_layers
    elif fields.has("sliding_window_pattern"):
        every = _pattern_length(fields)
        has_window = fields.has("sliding_window")
        is_sliding = [has_window and (layer + 1) % every != 0 for layer in range(num_layers)]
    elif fields.has("use_sliding_window"):
        is_sliding = _sliding_if_used(fields, num_layers)
    else:
        is_sliding = [fields.has("sliding_window")] * num_layers
    window = _read_window(fields) if any(is_sliding) else None
    return tuple(window if slides else None for slides in is_sliding)


def _read_window(fields: Fields) -> int:
    """Returns the keys that a query of layers with a window sees."""
    window = fields.count("sliding_window")
    if sees_later(fields):
        # config.json counts both sides, windows count one side and the query's own token.
        window = window // 2 + 1
    if fields.has("sliding_window_size"):
        window = fields.count("sliding_window_size") + 1  # MiMo's do not count a query's own key
    return window


def read_draft_window(fields: Fields) -> int | None:
    """Returns the window of draft layers; None of most families, whose draft layers see all."""
    is_local = fields.architecture() in FAMILIES_WITH_LOCAL_DRAFTS
    return _read_window(fields) if is_local and fields.has("sliding_window") else None


def _sliding_if_used(fields: Fields, num_layers: int) -> list[bool]:
    """Returns which layers have a window where use_sliding_window says whether any has."""
    if not fields.flag("use_sliding_window"):
        return [False] * num_layers
    layers = range(num_layers)
    if fields.architecture() == "SmolLM3ForCausalLM":
        unrotated = _named_unrotated_layers(fields, num_layers)
        return [fields.has("sliding_window") and layer in unrotated for layer in layers]
    first = fields.count("max_window_layers", 0, minimum=0)
    if fields.architecture() == "Qwen2MoeForCausalLM":
        return [layer < first and layer % 2 == 0 for layer in layers]
    return [layer >= first for layer in layers]


def _read_chunks(
    fields: Fields, num_layers: int, layer_types: Sequence[str] | None
) -> tuple[int | None, ...]:
    """Returns each layer's chunk as a window: by layer_types, or of all layers with positions."""
    if not fields.has("attention_chunk_size"):
        return (None,) * num_layers
    chunk = fields.count("attention_chunk_size")
    unrotated = _named_unrotated_layers(fields, num_layers)
    if layer_types is None:
        return tuple(None if layer in unrotated else -chunk for layer in range(num_layers))
    return tuple(-chunk if kind == CHUNKED else None for kind in layer_types)


def _pattern_length(fields: Fields) -> int:
    """Returns every how many layers one sees all keys; EXAONE writes LLLG for 4."""
    pattern = fields.values["sliding_window_pattern"]
    if isinstance(pattern, str) and pattern and pattern == "L" * (len(pattern) - 1) + "G":
        return len(pattern)
    return fields.count("sliding_window_pattern")


def read_unrotated_layers(fields: Fields, windows: Sequence[int | None]) -> tuple[int, ...]:
    """Returns the layers without positions: named ones, every n-th, or all without a window.

    Source: Yang et al. 2025, "Rope to Nope and Back Again".
    """
    num_layers = len(windows)
    if fields.architecture() == "Exaone4ForCausalLM":
        is_hybrid = fields.has("sliding_window")
        return tuple(layer for layer, window in enumerate(windows) if is_hybrid and window is None)
    if fields.architecture() == "Cohere2ForCausalLM":
        return tuple(layer for layer, window in enumerate(windows) if window is None)
    if _rotates_nothing(fields):
        return tuple(range(num_layers))
    if fields.architecture() in ("SmolLM3ForCausalLM", *FAMILIES_WITH_CHUNKS):
        return _named_unrotated_layers(fields, num_layers)
    return ()


def _named_unrotated_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Returns the layers without positions by no_rope_layers, or every n-th one."""
    rotates = fields.values.get("no_rope_layers")
    if rotates is None or rotates == []:
        every = fields.count("no_rope_layer_interval")
        return tuple(range(every - 1, num_layers, every))
    is_list = isinstance(rotates, list) and len(rotates) == num_layers
    if not is_list or any(each not in (0, 1) for each in rotates):
        raise fields.error("no_rope_layers", "0 or 1 for every layer; 0 has no positions")
    return tuple(layer for layer, each in enumerate(rotates) if not each)


def _rotates_nothing(fields: Fields) -> bool:
    """Returns whether no layer of a family or a file has positions."""
    architecture = fields.architecture()
    if architecture == "GraniteMoeHybridForCausalLM":
        return fields.values.get("position_embedding_type") != "rope"
    if architecture == "OlmoHybridForCausalLM":
        has_rope = fields.section("rope_parameters").has("rope_theta")
        return not has_rope and not fields.has("rope_theta")
    return architecture in FAMILIES_WITHOUT_POSITIONS
