"""Fields of config.json whose values are not supported."""

from models.config_sections.fields import Fields

_ACTIVATIONS = {
    "ApertusForCausalLM": ("xielu",),
    # transformers writes silu, and clamps as swiglu_limit says.
    "MiniMaxM3VLForCausalLM": ("swigluoai", "silu"),
}


def refuse_unsupported(fields: Fields) -> None:
    """Raises ConfigError where ignoring a field would give wrong output."""
    if not fields.architecture().startswith("Gemma"):
        served = _ACTIVATIONS.get(fields.architecture(), ("silu",))
        fields.choice("hidden_act", served, served[0])
        return
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    may_see_later = fields.architecture() == "Gemma3ForCausalLM"
    masks = (None, False, "vision", *([True] if may_see_later else []))
    if fields.values.get("use_bidirectional_attention") not in masks:
        raise fields.error(
            "use_bidirectional_attention",
            "false, or vision, which no text has; true is served of Gemma 3 alone",
        )
