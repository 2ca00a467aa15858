"""Families with hyper-connections, for random checkpoints: class, configuration, its changes."""

from tests.support.dense_variants import YARN_ROPE
from tests.support.expert_variants import DEEPSEEK_ROPE, DSA

COMPRESSED, HEAVILY = "compressed_sparse_attention", "heavily_compressed_attention"
DEEPSEEK_V4 = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "layer_types": ["sliding_attention", COMPRESSED, HEAVILY, COMPRESSED],
    "compress_rates": {COMPRESSED: 4, HEAVILY: 10},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 20,
    "o_groups": 2,
    "o_lora_rank": 6,
    "sliding_window": 7,
    "index_n_heads": 10,
    "index_head_dim": 8,
    "index_topk": 3,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "swiglu_limit": 2.0,
}
HY_4 = {
    **{name: each for name, each in DSA.items() if name not in ("n_group", "topk_group")},
    "num_hidden_layers": 4,
    "indexer_types": ["full", "shared"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "pad_token_id": 0,
    "eos_token_id": None,
    "hc_mult": 3,
    "hc_magnitude": 1.7,
    "swiglu_limit": 0.8,
}
HYPER_ROWS = {
    "deepseek_v4": ("DeepseekV4ForCausalLM", "DeepseekV4Config", DEEPSEEK_V4),
    "deepseek_v4_odd": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {
            **DEEPSEEK_V4,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "layer_types": [HEAVILY, COMPRESSED, COMPRESSED],
            "compress_rates": {COMPRESSED: 3, HEAVILY: 7},
            "mlp_layer_types": ["moe"] * 3,
            "head_dim": 12,
            "partial_rotary_factor": 0.5,
            "o_groups": 1,
            "sliding_window": 3,
            "index_n_heads": 9,
            "index_topk": 2,
            "hc_mult": 2,
            "rope_parameters": {**YARN_ROPE, "original_max_position_embeddings": 16},
            "tie_word_embeddings": True,
        },
    ),
    "hy_v4": ("HYV4ForCausalLM", "HYV4Config", HY_4),
    "hy_v4_odd": (
        "HYV4ForCausalLM",
        "HYV4Config",
        {
            **HY_4,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "index_n_heads": 9,
            "index_topk": 5,
            "n_shared_experts": 2,
            "hc_mult": 2,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "rope_parameters": DEEPSEEK_ROPE,
            "tie_word_embeddings": True,
        },
    ),
}
"""Rows in the form of _ROWS of tests.support.recent_variants."""
