"""Tiny random models that see images, each in two odd shapes, written by transformers."""

import copy
from pathlib import Path

import pytest
import torch
import transformers

from tests.support.recent_variants import GEMMA_4, GROWING_ROPE
from tests.support.recent_vision_variants import RECENT_VARIANTS
from tests.support.vision_parts import (
    ALTERNATING,
    CLIP,
    EXPERTS,
    GEMMA4_TOWER,
    GLM_EXPERTS,
    GLM_TOWER,
    HEADS_SHARE_ALL,
    IMAGE_TOKEN,
    INTERN,
    KIMI_TEXT,
    KIMI_TOWER,
    ODD_CLIP,
    ODD_INTERN,
    ODD_PINPOINTS,
    ODD_PIXTRAL,
    ODD_QWEN3_TOWER,
    ODD_SIGLIP,
    ODD_STATES,
    ODD_TEXT,
    PINPOINTS,
    PIXTRAL,
    QWEN2_TOWER,
    QWEN3_TOWER,
    QWEN25_TOWER,
    QWEN_GRIDS,
    SECTIONS,
    SHARED_EXPERT,
    SIGLIP,
    STATES,
    TEXT,
    TIED,
    TOKENS,
    UNTIED,
    WINDOWED,
    Variant,
    half_sections,
)

VARIANTS = {
    **RECENT_VARIANTS,
    "qwen3_vl": Variant(
        "Qwen3VL",
        TEXT | {"rope_parameters": ALTERNATING},
        QWEN3_TOWER | {"deepstack_visual_indexes": [0, 2, 3]},
        TIED,
        QWEN_GRIDS,
    ),
    "qwen3_vl_odd": Variant(
        "Qwen3VL",
        ODD_TEXT | {"rope_parameters": ALTERNATING | {"mrope_section": [4, 1, 3]}},
        ODD_QWEN3_TOWER | {"deepstack_visual_indexes": [1]},
        UNTIED,
        QWEN_GRIDS,
    ),
    "qwen3_vl_moe": Variant(
        "Qwen3VLMoe",
        TEXT | EXPERTS | {"rope_parameters": ALTERNATING},
        QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]},
        UNTIED,
        QWEN_GRIDS,
    ),
    "qwen3_vl_moe_odd": Variant(
        "Qwen3VLMoe",
        ODD_TEXT | EXPERTS | {"rope_parameters": ALTERNATING | {"mrope_section": [4, 2, 2]}},
        ODD_QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1, 2]},
        TIED,
        QWEN_GRIDS,
    ),
    "qwen3_5": Variant("Qwen3_5", TEXT | STATES, QWEN3_TOWER, UNTIED, QWEN_GRIDS),
    "qwen3_5_odd": Variant("Qwen3_5", ODD_TEXT | ODD_STATES, ODD_QWEN3_TOWER, TIED, QWEN_GRIDS),
    "qwen3_5_moe": Variant(
        "Qwen3_5Moe", TEXT | STATES | SHARED_EXPERT, QWEN3_TOWER, TIED, QWEN_GRIDS
    ),
    "qwen3_5_moe_odd": Variant(
        "Qwen3_5Moe", ODD_TEXT | ODD_STATES | SHARED_EXPERT, ODD_QWEN3_TOWER, UNTIED, QWEN_GRIDS
    ),
    "qwen2_5_vl": Variant(
        "Qwen2_5_VL",
        TEXT | HEADS_SHARE_ALL | {"rope_parameters": SECTIONS | {"mrope_section": [2, 1, 1]}},
        QWEN25_TOWER,
        UNTIED,
        ((4, 6), (10, 6), (8, 2)),
    ),
    "qwen2_5_vl_odd": Variant(
        "Qwen2_5_VL",
        ODD_TEXT
        | HEADS_SHARE_ALL
        | {"head_dim": 12, "rope_parameters": SECTIONS | {"mrope_section": [1, 2, 3]}},
        QWEN25_TOWER
        | {"depth": 4, "patch_size": 3, "window_size": 20, "out_hidden_size": 36}
        | {"fullatt_block_indexes": [0, 3], "num_heads": 3, "hidden_size": 36},
        TIED,
        ((14, 6), (2, 10), (8, 8)),
    ),
    "qwen2_vl": Variant(
        "Qwen2VL",
        TEXT | HEADS_SHARE_ALL | {"rope_parameters": SECTIONS | {"mrope_section": [2, 1, 1]}},
        QWEN2_TOWER,
        UNTIED,
        QWEN_GRIDS,
    ),
    "qwen2_vl_odd": Variant(
        "Qwen2VL",
        ODD_TEXT
        | HEADS_SHARE_ALL
        | {"head_dim": 12, "rope_parameters": SECTIONS | {"mrope_section": [1, 2, 3]}},
        QWEN2_TOWER
        | {"depth": 4, "patch_size": 3, "hidden_size": 36, "spatial_merge_size": 3, "mlp_ratio": 3},
        TIED,
        ((3, 6), (9, 3), (6, 6)),
    ),
    "glm4v": Variant(
        "Glm4v",
        TEXT | half_sections(8, [1, 1, 0]),
        GLM_TOWER,
        UNTIED,
        QWEN_GRIDS,
    ),
    "glm4v_odd": Variant(
        "Glm4v",
        ODD_TEXT | half_sections(12, [0, 2, 1]),
        GLM_TOWER
        | {"patch_size": 3, "image_size": 15, "out_hidden_size": 36, "attention_bias": True}
        | {"spatial_merge_size": 3, "hidden_size": 36, "num_heads": 3},
        TIED,
        ((3, 6), (9, 3), (6, 6)),
    ),
    "glm4v_moe": Variant(
        "Glm4vMoe",
        TEXT | half_sections(16, [1, 2, 1]) | GLM_EXPERTS,
        GLM_TOWER,
        UNTIED,
        QWEN_GRIDS,
    ),
    "kimi": Variant(
        "Kimi_K25",
        TEXT | KIMI_TEXT,
        KIMI_TOWER,
        TOKENS | {"projection_hidden_size": 24, "tie_word_embeddings": False},
        QWEN_GRIDS,
    ),
    "kimi_odd": Variant(
        "Kimi_K25",
        ODD_TEXT | KIMI_TEXT | {"num_attention_heads": 3, "num_key_value_heads": 3},
        KIMI_TOWER
        | {"patch_size": 3, "hidden_size": 36, "num_attention_heads": 3, "pos_emb_height": 7}
        | {"pos_emb_width": 7, "merge_kernel_size": [3, 3]},
        TOKENS
        | {"projection_hidden_size": 36, "projection_layer_norm_eps": 1e-3}
        | {"tie_word_embeddings": False},
        ((3, 6), (9, 3), (6, 6)),
    ),
    "mistral3": Variant(
        "Mistral3",
        TEXT | {"model_type": "mistral", "sliding_window": None},
        PIXTRAL,
        {"image_token_index": IMAGE_TOKEN, "tie_word_embeddings": False},
        ((4, 6), (2, 10), (8, 2)),
    ),
    "ministral3": Variant(
        "Mistral3",
        ODD_TEXT | {"model_type": "ministral3", "rope_parameters": GROWING_ROPE},
        ODD_PIXTRAL,
        {
            "image_token_index": IMAGE_TOKEN,
            "spatial_merge_size": 3,
            "multimodal_projector_bias": True,
            "tie_word_embeddings": True,
        },
        ((3, 6), (9, 3), (6, 6)),
    ),
    "gemma3": Variant(
        "Gemma3",
        TEXT | WINDOWED,
        INTERN,
        {"image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 4},
        ((1, 4, 4), (1, 4, 4)),
        least_step=4,
    ),
    "gemma3_odd": Variant(
        "Gemma3",
        ODD_TEXT | WINDOWED | {"sliding_window": 3},
        ODD_SIGLIP | {"image_size": 19},
        {"image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 9},
        ((1, 6, 6), (1, 6, 6), (1, 6, 6)),
        least_step=9,
    ),
    "gemma4": Variant(
        "Gemma4",
        TEXT | GEMMA_4 | {"use_bidirectional_attention": "vision", "sliding_window": 5},
        GEMMA4_TOWER | {"use_clipped_linears": True},
        {"image_token_id": IMAGE_TOKEN},
        ((3, 9), (6, 6), (9, 3)),
        least_step=4,
    ),
    "gemma4_odd": Variant(
        "Gemma4",
        ODD_TEXT
        | GEMMA_4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": 97,
        },
        GEMMA4_TOWER
        | {"patch_size": 3, "pooling_kernel_size": 2, "standardize": True, "hidden_size": 36}
        | {"num_attention_heads": 3, "num_key_value_heads": 3},
        {"image_token_id": IMAGE_TOKEN, "tie_word_embeddings": False},
        ((4, 6), (2, 10), (8, 2)),
    ),
    "gemma4_unified": Variant(
        "Gemma4Unified",
        TEXT | {name: each for name, each in GEMMA_4.items() if "per_layer" not in name},
        {"patch_size": 2, "mm_embed_dim": 24, "mm_posemb_size": 20, "output_proj_dims": 24},
        {"image_token_id": IMAGE_TOKEN},
        ((2, 3), (1, 5), (3, 1)),
        least_step=6,
    ),
    "internvl": Variant(
        "InternVL",
        TEXT | HEADS_SHARE_ALL | {"model_type": "qwen2"},
        INTERN,
        {"image_token_id": IMAGE_TOKEN, "tie_word_embeddings": False},
        ((1, 4, 4), (3, 4, 4), (2, 4, 4)),
    ),
    "internvl_odd": Variant(
        "InternVL",
        ODD_TEXT | {"model_type": "qwen3"},
        ODD_INTERN,
        {
            "image_token_id": IMAGE_TOKEN,
            "tie_word_embeddings": True,
            "downsample_ratio": 0.25,
        },
        ((1, 8, 8), (4, 8, 8)),
    ),
    "llava": Variant(
        "Llava",
        TEXT | HEADS_SHARE_ALL | {"model_type": "llama"},
        CLIP,
        {"image_token_index": IMAGE_TOKEN, "tie_word_embeddings": False},
        ((1, 4, 4), (1, 4, 4)),
    ),
    "llava_odd": Variant(
        "Llava",
        ODD_TEXT | {"model_type": "mistral", "sliding_window": None},
        ODD_CLIP,
        {
            "image_token_index": IMAGE_TOKEN,
            "vision_feature_layer": 1,
            "multimodal_projector_bias": False,
            "tie_word_embeddings": True,
        },
        ((1, 3, 3), (1, 3, 3), (1, 3, 3)),
    ),
    "llava_next": Variant(
        "LlavaNext",
        TEXT | HEADS_SHARE_ALL | {"model_type": "mistral", "sliding_window": None},
        CLIP,
        {
            "image_token_index": IMAGE_TOKEN,
            "tie_word_embeddings": False,
            "image_grid_pinpoints": PINPOINTS,
        },
        ((2, 4, 4, 15, 13), (3, 4, 4, 11, 29), (7, 4, 4, 40, 51)),
    ),
    "llava_next_odd": Variant(
        "LlavaNext",
        ODD_TEXT | HEADS_SHARE_ALL | {"model_type": "llama", "head_dim": 12},
        ODD_CLIP,
        {
            "image_token_index": IMAGE_TOKEN,
            "tie_word_embeddings": False,
            "image_grid_pinpoints": ODD_PINPOINTS,
            "vision_feature_layer": -1,
        },
        ((10, 3, 3, 61, 53), (4, 3, 3, 7, 30), (5, 3, 3, 15, 13)),
    ),
    "llava_onevision": Variant(
        "LlavaOnevision",
        TEXT | HEADS_SHARE_ALL | {"model_type": "qwen2"},
        SIGLIP,
        {
            "image_token_index": IMAGE_TOKEN,
            "tie_word_embeddings": False,
            "image_grid_pinpoints": PINPOINTS,
        },
        ((2, 4, 4, 15, 13), (3, 4, 4, 11, 29), (7, 4, 4, 40, 51)),
    ),
    "llava_onevision_odd": Variant(
        "LlavaOnevision",
        ODD_TEXT | HEADS_SHARE_ALL | {"model_type": "qwen2", "head_dim": 12},
        ODD_SIGLIP,
        {
            "image_token_index": IMAGE_TOKEN,
            "tie_word_embeddings": False,
            "image_grid_pinpoints": ODD_PINPOINTS,
            "vision_aspect_ratio": "anyres_max_2",
        },
        ((10, 3, 3, 61, 53), (4, 3, 3, 7, 30), (5, 3, 3, 15, 13)),
    ),
}
BUFFERS = {
    "input_min": -1.25,
    "input_max": 1.5,
    "output_min": -2.0,
    "output_max": 1.75,
    "std_bias": 0.125,
    "std_scale": 0.75,
}
"""Values of tensors that are no parameters in transformers, and stored with them."""
_ALWAYS = {"qwen3_vl", "qwen3_vl_odd", "gemma3"}
EVERY_VARIANT = [
    name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.families) for name in VARIANTS
]
"""Parameters of a test of all variants; most of them run with `scripts/test --families`."""


def write_vision_checkpoint(folder: Path, variant: str, whole: dict | None = None, **text):
    """Writes a variant's checkpoint, all weights random, and returns transformers' model of it.

    whole, text: changes of the whole and of its text part.
    """
    row = copy.deepcopy(VARIANTS[variant])
    config = getattr(transformers, f"{row.name}Config")(
        text_config=row.text | text,
        vision_config=row.vision,
        **row.whole | (whole or {}),
        attn_implementation="eager",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(variant.encode()))
        name = row.model or f"{row.name}ForConditionalGeneration"
        model = getattr(transformers, name)(config).eval()
        for name, param in model.named_parameters():
            is_norm = "norm" in name.rpartition(".")[0].rpartition(".")[2]
            with torch.no_grad():
                param.normal_(1.0 if is_norm and name.endswith("weight") else 0.0, 0.3)
        for name, buffer in model.named_buffers():
            if (own := name.rpartition(".")[2]) in BUFFERS:
                buffer.fill_(BUFFERS[own])
    model.save_pretrained(folder)
    return model
