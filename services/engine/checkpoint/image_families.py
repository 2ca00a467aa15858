"""Settings of each family's image processor, from a checkpoint's files.

The fields of each kind are the ones of `services.frontend.images.families`. Absent ones get the
defaults of transformers 5.24's classes.
"""

from dataclasses import replace
from typing import Any

from models.config_sections.fields import Fields
from services.engine.checkpoint.image_files import (
    ImageFiles,
    check_equal,
    image_size,
    pixel_area,
    square,
    token_ids,
)

_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_MAX_TILES = 256
_NEXT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
PINPOINTS = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]


def qwen_vl(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of Qwen's kind."""
    image = files.image
    settings = {
        "patch_size": image.count("patch_size", 14),
        "merge_size": image.count("merge_size", 2),
        "temporal_patch_size": image.count("temporal_patch_size", 2),
        "min_pixels": pixel_area(image, "min_pixels", "shortest_edge", 56 * 56),
        "max_pixels": pixel_area(image, "max_pixels", "longest_edge", 28 * 28 * 1280),
    }
    for name, of_encoder in (
        ("patch_size", "patch_size"),
        ("merge_size", "spatial_merge_size"),
        ("temporal_patch_size", "temporal_patch_size"),
    ):
        check_equal(files.vision, of_encoder, settings[name])
    return settings


def glm4v(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of GLM-4V's kind: as Qwen's, with areas of one frame, not of several."""
    defaults = {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}}
    settings = qwen_vl(replace(files, image=files.image.with_defaults(defaults)))
    num_frames = settings["temporal_patch_size"]
    areas = {name: settings[name] // num_frames for name in ("min_pixels", "max_pixels")}
    return settings | areas


def hy_v4(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of Hy4's kind: as Qwen's, always resized by a bicubic filter."""
    defaults = {
        "patch_size": 16,
        "temporal_patch_size": 1,
        "size": {"shortest_edge": 512 * 512, "longest_edge": 2048 * 2048},
    }
    settings = qwen_vl(replace(files, image=files.image.with_defaults(defaults)))
    return settings | {"resample": 3}


def minimax_m3(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of MiniMax M3's kind: as Qwen's, with tokens around an image."""
    values = dict(files.image.values)
    if values.get("size") == [672, 672]:  # what released files say and nothing follows
        del values["size"]
    image = Fields(files.image.file, values, files.image.prefix)
    defaults = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 451584}}
    settings = qwen_vl(replace(files, image=image.with_defaults(defaults)))
    spellings = ["]<]start of image[>[", "]<]end of image[>["]
    start_id, end_id = token_ids(files.folder, spellings)
    return settings | {"start_token_id": start_id, "end_token_id": end_id}


def pixtral(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of Pixtral's kind."""
    patch_size = files.processor.count("patch_size", 16)
    merge_size = files.processor.count("spatial_merge_size", 1)
    check_equal(files.vision, "patch_size", patch_size)
    check_equal(files.config, "spatial_merge_size", merge_size)
    height, width = image_size(files.image, 1024, edge="longest_edge")
    spellings = [
        str(files.processor.values.get(name) or default)
        for name, default in (
            ("image_break_token", "[IMG_BREAK]"),
            ("image_end_token", "[IMG_END]"),
        )
    ]
    break_id, end_id = token_ids(files.folder, spellings)
    return {
        "patch_size": patch_size,
        "merge_size": merge_size,
        "max_height": height,
        "max_width": width,
        "break_token_id": break_id,
        "end_token_id": end_id,
    }


def internvl(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of InternVL's kind."""
    height, width = image_size(files.image, 384)
    patch_size = square(files.vision, "patch_size", 14)
    tokenizer = Fields(files.folder / _TOKENIZER_CONFIG_FILE, {})
    if tokenizer.file.exists():
        tokenizer = Fields.read(tokenizer.file)
    extra = tokenizer.values.get("extra_special_tokens")
    named = tokenizer.values | (extra if isinstance(extra, dict) else {})
    spellings = [
        str(named.get("start_image_token") or "<img>"),
        str(named.get("end_image_token") or "</img>"),
    ]
    start_id, end_id = token_ids(files.folder, spellings)
    # The processor always asks for tiles, whatever the file says of `crop_to_patches`.
    settings = {
        "patch_size": patch_size,
        "tile_height": height,
        "tile_width": width,
        "min_tiles": files.image.count("min_patches", 1),
        "max_tiles": files.image.count("max_patches", 12),
        "image_seq_length": files.processor.count("image_seq_length", 256),
        "start_token_id": start_id,
        "end_token_id": end_id,
    }
    ratio = files.config.number("downsample_ratio", 0.5)
    num_vectors = int(height // patch_size * ratio) * int(width // patch_size * ratio)
    if settings["image_seq_length"] != num_vectors:
        raise files.processor.error("image_seq_length", f"{num_vectors}, the vectors of a tile")
    return settings


def published_kimi(image: Fields) -> Fields:
    """Returns the fields of a published checkpoint of Kimi under the names of transformers."""
    given = image.section("media_proc_cfg")
    if given.has("fixed_output_tokens"):
        raise given.error("fixed_output_tokens", "null")
    names = {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}
    values = {names.get(name, name): value for name, value in given.values.items()}
    if (side := values.pop("patch_limit_on_one_side", None)) is not None:
        values["size"] = {"max_height": side, "max_width": side}
    return Fields(given.file, values, given.prefix)


def kimi(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of Kimi's kind."""
    image = files.image
    height, width = (image.section("size").count(name, 512) for name in ("max_height", "max_width"))
    if height != width:
        raise image.error("size", "one number for both sides")
    settings = {
        "patch_size": image.count("patch_size", 14),
        "merge_size": image.count("merge_size", 2),
        "max_own_patches": image.count("max_patches", 16384),
        "max_side_patches": height,
    }
    check_equal(files.vision, "patch_size", settings["patch_size"])
    if files.vision.values.get("merge_kernel_size", [2, 2]) != [settings["merge_size"]] * 2:
        raise files.vision.error("merge_kernel_size", f"{settings['merge_size']} twice")
    return settings


def gemma3(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of InternVL's kind for images of one tile each."""
    if files.image.flag("do_pan_and_scan"):
        raise files.image.error("do_pan_and_scan", "false")
    height, width = image_size(files.image, 224)
    patch_size = square(files.vision, "patch_size", 16)
    check_equal(files.vision, "image_size", height)
    num_vectors = files.config.count("mm_tokens_per_image", 256)
    if files.processor.count("image_seq_length", num_vectors) != num_vectors:
        raise files.processor.error("image_seq_length", f"{num_vectors}, as in config.json")
    return {
        "patch_size": patch_size,
        "tile_height": height,
        "tile_width": width,
        "min_tiles": 1,
        "max_tiles": 1,
        "image_seq_length": num_vectors,
        "start_token_id": files.config.count("boi_token_index", 255999, minimum=0),
        "end_token_id": files.config.count("eoi_token_index", 256000, minimum=0),
    }


def gemma4(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of Gemma 4's kind."""
    patch_size = files.image.count("patch_size", 16)
    merge_size = files.image.count("pooling_kernel_size", 3)
    check_equal(files.vision, "patch_size", patch_size)
    check_equal(files.vision, "pooling_kernel_size", merge_size)
    return {
        "patch_size": patch_size,
        "merge_size": merge_size,
        "max_soft_tokens": files.image.count("max_soft_tokens", 280),
        "start_token_id": files.config.count("boi_token_id", 255999, minimum=0),
        "end_token_id": files.config.count("eoi_token_id", 258882, minimum=0),
    }


def gemma4_unified(files: ImageFiles) -> dict[str, Any]:
    """Returns the same with squares of patches as single patches."""
    settings = gemma4(files)
    patch_size = settings["patch_size"] * settings["merge_size"]
    return {**settings, "patch_size": patch_size, "merge_size": 1}


def llava(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of LLaVA 1.5's kind."""
    if files.image.flag("do_pad"):
        raise files.image.error("do_pad", "false")
    return {"patch_size": square(files.vision, "patch_size", 32), "side": _cropped_side(files)}


def llava_next(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of LLaVA-NeXT's kind; tiles never shrink."""
    side = _cropped_side(files)
    strategy = files.processor.values.get("vision_feature_select_strategy", "default")
    if strategy not in (None, "default"):
        raise files.processor.error("vision_feature_select_strategy", '"default"')
    pinpoints = files.image.values.get("image_grid_pinpoints") or _NEXT_PINPOINTS
    if not _are_tiled(pinpoints, side, side):
        raise files.image.error("image_grid_pinpoints", "a list of heights and widths in tiles")
    return {
        "patch_size": square(files.vision, "patch_size", 32),
        "tile_height": side,
        "tile_width": side,
        "image_grid_pinpoints": pinpoints,
        "max_anyres_tiles": _MAX_TILES,
    }


def _cropped_side(files: ImageFiles) -> int:
    """Returns the side of the square in the middle of an image."""
    height, width = image_size(files.image, 224, edge="shortest_edge")
    crop = files.image.section("crop_size")
    crop_height, crop_width = (crop.count(name, height) for name in ("height", "width"))
    if not height == width == crop_height == crop_width:
        raise files.image.error("crop_size", f"{height} x {height}, as size")
    check_equal(files.vision, "image_size", height)
    return height


def _are_tiled(pinpoints: object, height: int, width: int) -> bool:
    """Whether a JSON value is a list of heights and widths of whole tiles."""
    return isinstance(pinpoints, list) and all(
        isinstance(sides, list)
        and len(sides) == 2
        and all(type(side) is int and side > 0 for side in sides)
        and sides[0] % height == sides[1] % width == 0
        for sides in pinpoints
    )


def llava_onevision(files: ImageFiles) -> dict[str, Any]:
    """Returns the settings of LLaVA-OneVision's kind."""
    height, width = image_size(files.image, 384, edge="shortest_edge")
    patch_size = square(files.vision, "patch_size", 16)
    strategy = files.processor.values.get("vision_feature_select_strategy")
    if strategy == "default":
        raise files.processor.error("vision_feature_select_strategy", '"full"')
    num_vectors = (height // patch_size) * (width // patch_size)
    if files.processor.count("num_image_tokens", num_vectors) != num_vectors:
        raise files.processor.error("num_image_tokens", f"{num_vectors}, the vectors of a tile")
    pinpoints = files.image.values.get("image_grid_pinpoints") or PINPOINTS
    if not _are_tiled(pinpoints, height, width):
        raise files.image.error("image_grid_pinpoints", "a list of heights and widths in tiles")
    ratio = files.processor.values.get("vision_aspect_ratio") or "anyres_max_9"
    max_tiles = str(ratio).removeprefix("anyres_max_")
    if not max_tiles.isdecimal():
        raise files.processor.error("vision_aspect_ratio", "anyres_max_ and a number")
    return {
        "patch_size": patch_size,
        "tile_height": height,
        "tile_width": width,
        "image_grid_pinpoints": pinpoints,
        "max_anyres_tiles": int(max_tiles),
    }
