"""Fields of config.json whose values are not supported."""

from models.config_sections.fields import Fields


def refuse_unsupported(fields: Fields) -> None:
    """Refuses fields that would give wrong output if they were ignored.

    Raises:
        ConfigError: it names the field and its value.
    """
    if not fields.architecture().startswith("Gemma"):
        activation = "xielu" if fields.architecture() == "ApertusForCausalLM" else "silu"
        fields.choice("hidden_act", (activation,), activation)
        return
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    may_see_later = fields.architecture() == "Gemma3ForCausalLM"
    served = (None, False, "vision", *([True] if may_see_later else []))
    if fields.values.get("use_bidirectional_attention") not in served:
        raise fields.error(
            "use_bidirectional_attention",
            "false, or vision, which no text has; true is served of Gemma 3 alone",
        )
