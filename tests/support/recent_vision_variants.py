"""Tiny random models that see images, of families of 2026; see vision_variants."""

from tests.support.recent_variants import HALF_ROPE, MINIMAX_M3
from tests.support.vision_parts import IMAGE_TOKEN, ODD_TEXT, QWEN_GRIDS, TEXT, Variant

MINIMAX_TOWER = {
    "num_hidden_layers": 3,
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "patch_size": 4,
}
HY_4_TEXT = {
    "num_hidden_layers": 3,
    "indexer_types": ["full", "shared", "full"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_n_heads": 10,
    "index_head_dim": 12,
    "index_topk": 4,
    "hc_mult": 3,
    "pad_token_id": 0,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}
HY_4_TOWER = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "patch_size": 4,
    "max_image_size": 28,
    "out_hidden_size": 32,
}
RECENT_VARIANTS = {
    "hy_v4": Variant(
        "HYV4VL",
        TEXT | HY_4_TEXT,
        HY_4_TOWER,
        {"image_token_id": IMAGE_TOKEN, "tie_word_embeddings": False},
        QWEN_GRIDS,
    ),
    "hy_v4_odd": Variant(
        "HYV4VL",
        ODD_TEXT
        | HY_4_TEXT
        | {"num_attention_heads": 3, "num_key_value_heads": 3, "qk_rope_head_dim": 12}
        | {"hc_mult": 2, "rms_norm_eps": 1e-3}
        | {"rope_parameters": {**HY_4_TEXT["rope_parameters"], "mrope_section": [3, 1, 2]}},
        HY_4_TOWER
        | {"patch_size": 3, "hidden_size": 36, "num_attention_heads": 3, "max_image_size": 15}
        | {"spatial_merge_size": 3, "out_hidden_size": 36, "rms_norm_eps": 1e-3},
        {"image_token_id": IMAGE_TOKEN, "tie_word_embeddings": True},
        ((3, 6), (9, 3), (6, 6)),
    ),
    "minimax_m3": Variant(
        "MiniMaxM3VL",
        TEXT | MINIMAX_M3 | {"rotary_dim": 8, "rope_parameters": HALF_ROPE},
        MINIMAX_TOWER,
        {"image_token_index": IMAGE_TOKEN, "projector_hidden_size": 28}
        | {"tie_word_embeddings": False},
        QWEN_GRIDS,
        model="MiniMaxM3SparseForConditionalGeneration",
    ),
    "minimax_m3_odd": Variant(
        "MiniMaxM3VL",
        ODD_TEXT | MINIMAX_M3 | {"index_n_heads": 1, "rotary_dim": 16},
        MINIMAX_TOWER
        | {"patch_size": 3, "hidden_size": 48, "num_attention_heads": 3, "spatial_merge_size": 3}
        | {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}, "layer_norm_eps": 1e-3},
        {
            "image_token_index": IMAGE_TOKEN,
            "projector_hidden_size": 20,
            "tie_word_embeddings": True,
        },
        ((3, 6), (9, 3), (6, 6)),
        model="MiniMaxM3SparseForConditionalGeneration",
    ),
}
