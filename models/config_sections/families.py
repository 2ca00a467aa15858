"""Families of models, by the facts that config.json does not say."""

DRAFTING_ARCHITECTURES = (
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM",
    "HYV4ForCausalLM",
    "MiMoV2FlashForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
"""Families whose draft layers models.deepseek_mtp can build."""

OWN_ARCHITECTURES = {
    "ApertusForCausalLM": "models.apertus.ApertusForCausalLM",
    "BailingHybridForCausalLM": "models.kimi_linear.BailingHybridForCausalLM",
    "Cohere2ForCausalLM": "models.cohere2.Cohere2ForCausalLM",
    "DeepseekV2ForCausalLM": "models.deepseek_v2.DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM": "models.deepseek_v2.DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM": "models.deepseek_v2.DeepseekV2ForCausalLM",
    "DeepseekV4ForCausalLM": "models.deepseek_v4.DeepseekV4ForCausalLM",
    "Ernie4_5ForCausalLM": "models.llama.LlamaForCausalLM",
    "Exaone4ForCausalLM": "models.exaone4.Exaone4ForCausalLM",
    "FalconH1ForCausalLM": "models.falcon_h1.FalconH1ForCausalLM",
    "Gemma2ForCausalLM": "models.gemma.Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "models.gemma.Gemma3ForCausalLM",
    "Gemma4ForCausalLM": "models.gemma4.Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM": "models.gemma4.Gemma4ForCausalLM",
    "Glm4ForCausalLM": "models.glm4.Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "models.glm4_moe.Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "models.deepseek_v2.DeepseekV2ForCausalLM",
    "GlmMoeDsaForCausalLM": "models.deepseek_v2.DeepseekV2ForCausalLM",
    "GptOssForCausalLM": "models.gpt_oss.GptOssForCausalLM",
    "GraniteForCausalLM": "models.granite.GraniteForCausalLM",
    "GraniteMoeHybridForCausalLM": "models.granite_moe_hybrid.GraniteMoeHybridForCausalLM",
    "HYV3ForCausalLM": "models.hy_v3.HYV3ForCausalLM",
    "HYV4ForCausalLM": "models.hy_v4.HYV4ForCausalLM",
    "InternLM3ForCausalLM": "models.llama.LlamaForCausalLM",
    "KimiLinearForCausalLM": "models.kimi_linear.KimiLinearForCausalLM",
    "Lfm2ForCausalLM": "models.lfm2.Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM": "models.lfm2.Lfm2ForCausalLM",
    "Llama4ForCausalLM": "models.llama4.Llama4ForCausalLM",
    "LlamaForCausalLM": "models.llama.LlamaForCausalLM",
    "Mamba2ForCausalLM": "models.mamba2.Mamba2ForCausalLM",
    "MiMoV2FlashForCausalLM": "models.mimo_v2.MiMoV2FlashForCausalLM",
    "MiniMaxForCausalLM": "models.minimax.MiniMaxForCausalLM",
    "MiniMaxM2ForCausalLM": "models.minimax_m2.MiniMaxM2ForCausalLM",
    "MiniMaxM3VLForCausalLM": "models.minimax_m3.MiniMaxM3VLForCausalLM",
    "Ministral3ForCausalLM": "models.llama.LlamaForCausalLM",
    "Mistral4ForCausalLM": "models.deepseek_v2.DeepseekV2ForCausalLM",
    "MistralForCausalLM": "models.llama.LlamaForCausalLM",
    "MistralLarge3ForCausalLM": "models.deepseek_v2.DeepseekV2ForCausalLM",
    "MixtralForCausalLM": "models.mixtral.MixtralForCausalLM",
    "NemotronHForCausalLM": "models.nemotron_h.NemotronHForCausalLM",
    "Olmo2ForCausalLM": "models.olmo2.Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "models.olmo2.Olmo2ForCausalLM",
    "OlmoHybridForCausalLM": "models.olmo_hybrid.OlmoHybridForCausalLM",
    "Phi3ForCausalLM": "models.phi3.Phi3ForCausalLM",
    "Qwen2ForCausalLM": "models.llama.LlamaForCausalLM",
    "Qwen2MoeForCausalLM": "models.qwen3_moe.Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "models.qwen3.Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "models.qwen3_moe.Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "models.qwen3_next.Qwen3NextForCausalLM",
    "Qwen3VLMoeForCausalLM": "models.qwen3_moe.Qwen3VLMoeForCausalLM",
    "Qwen3_5ForCausalLM": "models.qwen3_next.Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "models.qwen3_next.Qwen3_5MoeForCausalLM",
    "SeedOssForCausalLM": "models.llama.LlamaForCausalLM",
    "SmolLM3ForCausalLM": "models.llama.LlamaForCausalLM",
    "SolarOpenForCausalLM": "models.glm4_moe.Glm4MoeForCausalLM",
}
"""Architecture of config.json -> the class that runs it, for code that must not import torch."""

_QWEN_WITH_STATES = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
FAMILIES_WITH_NORMS_FROM_ONE = (*_QWEN_WITH_STATES, "MiniMaxM3VLForCausalLM")
"""Families besides Gemma that add one to the stored weights of norms."""

FAMILIES_WITH_STATES = (
    *_QWEN_WITH_STATES,
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

FAMILIES_OF_EXPERTS = frozenset(
    {
        "BailingHybridForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "HYV3ForCausalLM",
        "HYV4ForCausalLM",
        "KimiLinearForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MiniMaxM3VLForCausalLM",
        "Mistral4ForCausalLM",
        "MistralLarge3ForCausalLM",
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "SolarOpenForCausalLM",
    }
)
"""Families without dense models that leave the choice of the feed-forward part to the config."""

FAMILIES_WITH_CHUNKS = ("Llama4ForCausalLM",)
"""Families whose rotated layers attend within chunks of positions."""

FAMILIES_WITH_COMPRESSION = ("DeepseekV4ForCausalLM",)
"""Families whose layers attend to recent keys and to compressed ones."""

FAMILIES_WITH_LOCAL_DRAFTS = ("DeepseekV4ForCausalLM", "MiMoV2FlashForCausalLM")
"""Families whose draft layers have a window and read the output of the model's last layer."""

FAMILIES_WITH_CHOSEN_BLOCKS = ("MiniMaxM3VLForCausalLM",)
"""Families with layers whose queries attend to the blocks of keys that an index chooses."""

FAMILIES_WITHOUT_POSITIONS = ("KimiLinearForCausalLM", "NemotronHForCausalLM")
"""Families whose attention does not rotate queries and keys."""

FAMILIES_WITHOUT_WINDOWS = (
    *(family for family in FAMILIES_WITH_STATES if family != "MiniMaxForCausalLM"),
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
    "HYV4ForCausalLM",
    "InternLM3ForCausalLM",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MiniMaxM3VLForCausalLM",
    "Mistral4ForCausalLM",
    "MistralLarge3ForCausalLM",
    "Olmo2ForCausalLM",
    "SeedOssForCausalLM",
    "SolarOpenForCausalLM",
)
"""Families that see all keys though config.json has a sliding_window, as converted files may."""
