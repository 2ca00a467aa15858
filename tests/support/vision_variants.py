"""Tiny random models that see images, each in two odd shapes, written by transformers."""

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

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


@dataclass(frozen=True)
class Variant:
    """A model that sees images: its class, and the fields of its parts and of the whole."""

    name: str
    text: dict
    vision: dict
    whole: dict
    grids: tuple[tuple[int, ...], ...]
    """Of images that it sees, odd ones."""


QWEN_GRIDS = ((4, 6), (2, 10), (8, 2))

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

VARIANTS = {
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
}
_ALWAYS = {"qwen3_vl", "qwen3_vl_odd"}
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
        model = getattr(transformers, f"{row.name}ForConditionalGeneration")(config).eval()
        for name, param in model.named_parameters():
            is_norm = "norm" in name.rpartition(".")[0].rpartition(".")[2]
            with torch.no_grad():
                param.normal_(1.0 if is_norm and name.endswith("weight") else 0.0, 0.3)
    model.save_pretrained(folder)
    return model
