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

VARIANTS = {
    "qwen3_vl": Variant(
        "Qwen3VL",
        TEXT | {"rope_parameters": ALTERNATING},
        QWEN3_TOWER | {"deepstack_visual_indexes": [0, 2, 3]},
        TOKENS | {"tie_word_embeddings": True},
        QWEN_GRIDS,
    ),
    "qwen3_vl_odd": Variant(
        "Qwen3VL",
        ODD_TEXT | {"rope_parameters": ALTERNATING | {"mrope_section": [4, 1, 3]}},
        ODD_QWEN3_TOWER | {"deepstack_visual_indexes": [1]},
        TOKENS | {"tie_word_embeddings": False},
        QWEN_GRIDS,
    ),
}
_ALWAYS = {"qwen3_vl", "qwen3_vl_odd"}
EVERY_VARIANT = [
    name if name in _ALWAYS else pytest.param(name, marks=pytest.mark.families) for name in VARIANTS
]
"""Parameters of a test of all variants; most of them run with `scripts/test --families`."""


def write_vision_checkpoint(folder: Path, variant: str, **text):
    """Writes a variant's checkpoint, all weights random, and returns transformers' model of it.

    text: changes of its text part.
    """
    row = copy.deepcopy(VARIANTS[variant])
    config = getattr(transformers, f"{row.name}Config")(
        text_config=row.text | text,
        vision_config=row.vision,
        **row.whole,
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
