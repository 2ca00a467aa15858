"""Settings of image processors, as engines send them."""

import json
from typing import Any

IMAGE_TOKEN_ID = 7

_COMMON = {
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen_vl": {
        **_COMMON,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
    },
    "glm4v": {
        **_COMMON,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 56 * 112,
        "max_pixels": 14 * 28 * 15000,
    },
    "hy_v4": {
        **_COMMON,
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 1,
        "min_pixels": 512 * 512,
        "max_pixels": 2048 * 2048,
    },
    "minimax_m3": {
        **_COMMON,
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 56 * 56,
        "max_pixels": 451584,
        "start_token_id": 8,
        "end_token_id": 9,
    },
    "pixtral": {
        **_COMMON,
        "patch_size": 14,
        "merge_size": 2,
        "max_height": 1540,
        "max_width": 1540,
        "break_token_id": 8,
        "end_token_id": 9,
    },
    "internvl": {
        **_COMMON,
        "patch_size": 14,
        "tile_height": 448,
        "tile_width": 448,
        "min_tiles": 1,
        "max_tiles": 12,
        "image_seq_length": 256,
        "start_token_id": 8,
        "end_token_id": 9,
    },
    "gemma4": {
        **_COMMON,
        "patch_size": 16,
        "merge_size": 3,
        "max_soft_tokens": 280,
        "start_token_id": 8,
        "end_token_id": 9,
    },
    "kimi": {
        **_COMMON,
        "patch_size": 14,
        "merge_size": 2,
        "max_own_patches": 16384,
        "max_side_patches": 512,
    },
    "llava": {**_COMMON, "patch_size": 14, "side": 336},
    "llava_next": {
        **_COMMON,
        "patch_size": 14,
        "tile_height": 336,
        "tile_width": 336,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "max_anyres_tiles": 256,
    },
    "llava_onevision": {
        **_COMMON,
        "patch_size": 14,
        "tile_height": 384,
        "tile_width": 384,
        "image_grid_pinpoints": [
            [384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)
        ],
        "max_anyres_tiles": 9,
    },
}


def settings_text(kind: str, **changes: Any) -> str:
    """Returns a kind's settings with changes as JSON."""
    return json.dumps(SETTINGS[kind] | changes)
