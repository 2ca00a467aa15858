"""Shapes of tiny texts and towers, of which models that see images are made."""

from dataclasses import dataclass

TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
ODD_TEXT = TEXT | {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}
ALTERNATING = SECTIONS | {"mrope_interleaved": True}
IMAGE_TOKEN = 90
TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": 91, "vision_start_token_id": 92}

QWEN3_TOWER = {
    "depth": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 36,
    "out_hidden_size": 32,
}
ODD_QWEN3_TOWER = QWEN3_TOWER | {
    "depth": 3,
    "hidden_size": 32,
    "patch_size": 3,
    "num_position_embeddings": 25,
    "out_hidden_size": 36,
}
QWEN25_TOWER = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "out_hidden_size": 32,
}
QWEN2_TOWER = {
    "depth": 3,
    "embed_dim": 24,
    "hidden_size": 32,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 4,
}
GLM_TOWER = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "image_size": 24,
    "out_hidden_size": 32,
}
KIMI_TOWER = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "patch_size": 4,
    "pos_emb_height": 5,
    "pos_emb_width": 5,
}
KIMI_TEXT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
}
GLM_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def half_sections(head_dim: int, sections: list[int]) -> dict:
    """Returns fields of a text of which half of each head is rotated, in sections."""
    rope = SECTIONS | {"partial_rotary_factor": 0.5, "mrope_section": sections}
    return {"pad_token_id": 0, "head_dim": head_dim, "rope_parameters": rope}


PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 64,
}
ODD_PIXTRAL = PIXTRAL | {
    "hidden_size": 36,
    "num_attention_heads": 3,
    "patch_size": 3,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
INTERN = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
ODD_INTERN = INTERN | {
    "hidden_size": 30,
    "num_attention_heads": 5,
    "patch_size": [3, 3],
    "image_size": [24, 24],
    "attention_bias": True,
    "use_qk_norm": True,
    "norm_type": "rms_norm",
    "use_mean_pooling": False,
}
SIGLIP = INTERN | {"model_type": "siglip_vision_model", "vision_use_head": False}
ODD_SIGLIP = SIGLIP | {
    "hidden_size": 30,
    "num_attention_heads": 5,
    "patch_size": 3,
    "image_size": 9,
    "vision_use_head": True,
}
GEMMA4_TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 20,
}
CLIP = INTERN | {"model_type": "clip_vision_model", "hidden_act": "quick_gelu"}
ODD_CLIP = CLIP | {
    "hidden_size": 30,
    "num_attention_heads": 5,
    "patch_size": 3,
    "image_size": 9,
    "hidden_act": "gelu",
}
PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 48]]
ODD_PINPOINTS = [[9, 27], [18, 18], [27, 9], [27, 27]]
WINDOWED = {
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
}
STATES = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": ALTERNATING | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}
ODD_STATES = STATES | {
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERT = EXPERTS | {"shared_expert_intermediate_size": 40}
UNTIED = TOKENS | {"tie_word_embeddings": False}
TIED = TOKENS | {"tie_word_embeddings": True}
HEADS_SHARE_ALL = {"head_dim": 8, "use_sliding_window": False}
QWEN_GRIDS = ((4, 6), (2, 10), (8, 2))


@dataclass(frozen=True)
class Variant:
    """A model that sees images: its class, and the fields of its parts and of the whole."""

    name: str
    text: dict
    vision: dict
    whole: dict
    grids: tuple[tuple[int, ...], ...]
    """Grids of images that it sees, odd ones."""
    least_step: int = 1
    """Tokens that a step must have room for: those of an image that one step computes."""
    model: str | None = None
    """The class of the whole; None for the one named like the config's."""
