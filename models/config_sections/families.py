"""Families of models, by the facts that config.json does not say."""

DRAFTING_ARCHITECTURES = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
"""Families whose draft layers models.deepseek_mtp can build."""

OWN_ARCHITECTURES = (
    "ApertusForCausalLM",
    "BailingHybridForCausalLM",
    "Cohere2ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Exaone4ForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "HYV3ForCausalLM",
    "InternLM3ForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Llama4ForCausalLM",
    "LlamaForCausalLM",
    "Mamba2ForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniMaxForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM",
    "Mistral4ForCausalLM",
    "MistralForCausalLM",
    "MistralLarge3ForCausalLM",
    "MixtralForCausalLM",
    "NemotronHForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoHybridForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLMoeForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM",
)
"""The keys of models.registry.ARCHITECTURES, for code that must not import torch."""

FAMILIES_WITH_NORMS_FROM_ONE = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
"""Families besides Gemma that add one to the stored weights of norms."""

FAMILIES_WITH_STATES = (
    *FAMILIES_WITH_NORMS_FROM_ONE,
    "BailingHybridForCausalLM",
    "FalconH1ForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Mamba2ForCausalLM",
    "MiniMaxForCausalLM",
    "NemotronHForCausalLM",
    "OlmoHybridForCausalLM",
)
"""Families some of whose layers keep a state that is not keys and values."""

FAMILIES_WITH_CHUNKS = ("Llama4ForCausalLM",)
"""Families whose rotated layers attend within chunks of positions."""

FAMILIES_WITH_COMPRESSION = ("DeepseekV4ForCausalLM",)
"""Families whose layers attend to recent keys and to compressed ones."""

FAMILIES_WITHOUT_POSITIONS = ("KimiLinearForCausalLM", "NemotronHForCausalLM")
"""Families whose attention does not rotate queries and keys."""

FAMILIES_WITHOUT_WINDOWS = (
    *FAMILIES_WITH_STATES,
    "ApertusForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "GraniteForCausalLM",
    "HYV3ForCausalLM",
    "InternLM3ForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Mistral4ForCausalLM",
    "MistralLarge3ForCausalLM",
    "Olmo2ForCausalLM",
    "SeedOssForCausalLM",
    "SolarOpenForCausalLM",
)
"""Families that see all keys though config.json has a sliding_window, as converted files may."""
