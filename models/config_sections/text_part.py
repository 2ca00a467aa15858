"""The text part of a model that also has parts for images or videos.

Text alone has the same position in time, height and width, so rotations with a section for each
(M-RoPE) are plain ones.
"""

from typing import Any

from models.config_sections.families import OWN_ARCHITECTURES
from models.config_sections.fields import ConfigError, Fields, shown

WRAPPERS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "Glm4vForConditionalGeneration": "glm4v_text",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe_text",
    "HYV4VLForConditionalGeneration": "hy_v4_vl_text",
    "InternVLForConditionalGeneration": "qwen2",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
    "Llama4ForConditionalGeneration": "llama4_text",
    "LlavaForConditionalGeneration": "llama",
    "LlavaNextForConditionalGeneration": "llama",
    "LlavaOnevisionForConditionalGeneration": "qwen2",
    "MiniMaxM3SparseForConditionalGeneration": "minimax_m3_vl_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
}
"""Class of a whole model -> the model_type of its text part, if config.json names none."""

TEXT_CLASSES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "hy_v4_vl_text": "HYV4ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""model_type of a text part -> the class that computes the same."""

_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4v_moe_text": {"attention_bias": True},
    "hy_v4_vl_text": {"rope_interleave": True},
    "qwen2_vl_text": {"rope_theta": 1_000_000.0},
    "qwen2_5_vl_text": {"rope_theta": 1_000_000.0},
    "qwen3_vl_text": {"rope_theta": 500_000.0},
    "qwen3_vl_moe_text": {"rope_theta": 500_000.0},
}
"""model_type of a text part -> fields that its file may leave out and its class sees otherwise."""

_FLAT = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
"""Classes whose first files have the fields of the text part beside those of the whole."""


_HEADLESS = ("ForSequenceClassification", "TextModel", "Model")
"""Ends of the names of classes that are decoders without a head that chooses tokens."""


def with_decoder_class(fields: Fields) -> Fields:
    """Returns the fields of a decoder without a head as those of its family; others as they are."""
    architecture = fields.architecture()
    for end in _HEADLESS:
        family = f"{architecture.removesuffix(end)}ForCausalLM"
        if architecture.endswith(end) and family in OWN_ARCHITECTURES:
            values = {**fields.values, "architectures": [family], "tie_word_embeddings": True}
            return Fields(fields.file, values)
    return fields


def is_wrapper(fields: Fields) -> bool:
    """Returns whether config.json describes a model whose text part is served."""
    return fields.architecture() in WRAPPERS


def text_part(fields: Fields) -> Fields:
    """Returns the fields of a model's text part, with the class that runs it; others as they are.

    Raises:
        ConfigError: a field is missing or ill-typed, or no class runs the text part.
    """
    if not is_wrapper(fields):
        return with_decoder_class(fields)
    wrapper = fields.architecture()
    section = fields.section("text_config")
    if not section.values and wrapper not in _FLAT:
        raise fields.error("text_config", "an object with the fields of the text part")
    text_type = _text_type(section, wrapper)
    given = {name: value for name, value in section.values.items() if value is not None}
    if fields.has("tie_word_embeddings"):
        # The whole model's decides in transformers; the part's may be a default.
        given.pop("tie_word_embeddings", None)
    defaults = _TEXT_DEFAULTS.get(text_type, {})
    values = {**defaults, **fields.values, **given, "architectures": [TEXT_CLASSES[text_type]]}
    return Fields(fields.file, values)


def _text_type(section: Fields, wrapper: str) -> str:
    """Returns the model_type of a text part; raises ConfigError if no class runs it."""
    text_type = section.values.get("model_type", WRAPPERS[wrapper])
    if isinstance(text_type, str) and text_type in TEXT_CLASSES:
        return text_type
    raise ConfigError(
        f"{section.file}: {wrapper} holds text of model_type {shown(text_type)}, which no class "
        f"here runs; served are {', '.join(TEXT_CLASSES)}"
    )
