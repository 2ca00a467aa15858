"""The engine describes a checkpoint's images as transformers processes them."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from models.config import ConfigError
from services.engine.checkpoint.image_settings import ImageSettings, image_settings
from services.engine.checkpoint.model_files import ModelFolderError
from services.frontend.images.processor import ImageProcessor
from tests.support.image_files import picture
from tests.unit.models.tokenizers.test_byte_ranks import tekken_of

HALF = [0.5, 0.5, 0.5]
ADDED = ["[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<begin>"]
ADDED += ["]<]start of image[>[", "]<]end of image[>["]
TOKENIZER = {"added_tokens": [{"id": 100 + i, "content": text} for i, text in enumerate(ADDED)]}
QWEN3_VL = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": HALF,
    "image_std": HALF,
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
QWEN2_5_VL = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_processor_type": "Qwen2VLImageProcessor",
}
MISTRAL3 = {
    "do_convert_rgb": True,
    "image_processor_type": "PixtralImageProcessorFast",
    "patch_size": {"height": 14, "width": 14},
    "resample": 3,
    "size": {"longest_edge": 1540},
}
INTERNVL = {
    "crop_to_patches": False,
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "max_patches": 6,
    "min_patches": 2,
    "do_center_crop": None,
    "size": {"height": 448, "width": 448},
}
LLAVA = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "image_grid_pinpoints": [[384, 768], [768, 384]],
    "image_mean": HALF,
    "image_std": HALF,
    "size": {"height": 384, "width": 384},
}


def read(
    folder: Path, model_type: str, image=None, processor=None, vision=None, **config
) -> ImageSettings | None:
    """Writes a checkpoint's files and returns its settings, which a frontend must accept."""
    for name, content in (
        ("preprocessor_config.json", image),
        ("processor_config.json", processor),
        ("tokenizer.json", TOKENIZER),
    ):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    config = {"model_type": model_type, "vision_config": vision or {}, **config}
    found = image_settings(folder, config)
    if found is not None:
        text = json.dumps(found.settings)
        ImageProcessor(found.kind, text, image_token_id=found.image_token_id, max_patches=2**17)
    return found


def without_common(found: ImageSettings) -> dict:
    common = {"resample", "rescale_factor", "image_mean", "image_std"}
    return {name: value for name, value in found.settings.items() if name not in common}


def test_tokens_of_images_are_found_in_a_made_tokenizer(tmp_path):
    octets = {bytes([byte]): byte for byte in range(256)}
    special = [{"rank": r, "token_str": t} for r, t in enumerate(["[IMG_BREAK]", "[IMG_END]"])]
    (tmp_path / "tekken.json").write_text(
        json.dumps(tekken_of(octets) | {"special_tokens": special})
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(MISTRAL3))
    found = image_settings(tmp_path, {"model_type": "mistral3", "vision_config": {}})
    assert (found.settings["break_token_id"], found.settings["end_token_id"]) == (0, 1)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_areas_are_the_edges_of_the_size(tmp_path, model_type):
    found = read(tmp_path, model_type, QWEN3_VL, vision={"patch_size": 16})
    assert found.kind == "qwen_vl"
    assert found.image_token_id == (248056 if "3_5" in model_type else 151655)
    assert found.settings == {
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": HALF,
        "image_std": HALF,
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 65536,
        "max_pixels": 16777216,
    }


def test_areas_of_older_files_have_their_own_fields(tmp_path):
    found = read(tmp_path, "qwen2_5_vl", QWEN2_5_VL, image_token_id=5)
    assert found.image_token_id == 5
    assert (found.settings["min_pixels"], found.settings["max_pixels"]) == (3136, 12845056)
    both = {**QWEN2_5_VL, "size": {"min_pixels": 1, "max_pixels": 2}}
    assert read(tmp_path, "qwen2_5_vl", both).settings == found.settings


def test_rows_of_mistral3_end_with_tokens_of_its_tokenizer(tmp_path):
    processor = {"patch_size": 14, "spatial_merge_size": 2, "image_end_token": "[IMG_END]"}
    found = read(tmp_path, "mistral3", MISTRAL3, processor, image_token_index=11)
    assert (found.kind, found.image_token_id) == ("pixtral", 11)
    assert without_common(found) == {
        "patch_size": 14,
        "merge_size": 2,
        "max_height": 1540,
        "max_width": 1540,
        "break_token_id": 100,
        "end_token_id": 101,
    }


def test_images_of_internvl_are_enclosed_by_tokens_of_its_tokenizer(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"extra_special_tokens": {"start_image_token": "<begin>"}})
    )
    found = read(tmp_path, "internvl", INTERNVL, {"image_seq_length": 256})
    assert (found.kind, found.image_token_id) == ("internvl", 151667)
    assert without_common(found) == {
        "patch_size": 14,
        "tile_height": 448,
        "tile_width": 448,
        "min_tiles": 2,
        "max_tiles": 6,
        "image_seq_length": 256,
        "start_token_id": 104,
        "end_token_id": 103,
    }


def test_tiles_of_llava_onevision_are_in_two_files(tmp_path):
    processor = {"num_image_tokens": 729, "vision_aspect_ratio": "anyres_max_4"}
    found = read(tmp_path, "llava_onevision", LLAVA, processor, {"patch_size": 14})
    assert (found.kind, found.image_token_id) == ("llava_onevision", 151646)
    assert without_common(found) == {
        "patch_size": 14,
        "tile_height": 384,
        "tile_width": 384,
        "image_grid_pinpoints": [[384, 768], [768, 384]],
        "max_anyres_tiles": 4,
    }


def test_images_of_gemma3_are_one_tile_between_line_breaks(tmp_path):
    image = {"size": {"height": 896, "width": 896}, "do_pan_and_scan": None, "image_mean": HALF}
    vision = {"patch_size": 14, "image_size": 896}
    found = read(tmp_path, "gemma3", image, {"image_seq_length": 256}, vision, boi_token_index=5)
    assert (found.kind, found.image_token_id) == ("internvl", 262144)
    assert (found.template_token_id, found.text_around) == (5, "\n\n")
    assert without_common(found) == {
        "patch_size": 14,
        "tile_height": 896,
        "tile_width": 896,
        "min_tiles": 1,
        "max_tiles": 1,
        "image_seq_length": 256,
        "start_token_id": 5,
        "end_token_id": 256000,
    }
    with pytest.raises(ConfigError, match="do_pan_and_scan is True; it must be false"):
        read(tmp_path, "gemma3", {**image, "do_pan_and_scan": True}, vision=vision)


@pytest.mark.parametrize(
    ("model_type", "patch_size", "merge_size"), [("gemma4", 16, 3), ("gemma4_unified", 48, 1)]
)
def test_images_of_gemma4_have_a_number_of_tokens(tmp_path, model_type, patch_size, merge_size):
    found = read(tmp_path, model_type, {"max_soft_tokens": 560}, vision={"patch_size": 16})
    assert (found.kind, found.image_token_id) == ("gemma4", 258880)
    assert (found.template_token_id, found.text_around) == (258880, "")
    assert found.settings["image_std"] == [1.0, 1.0, 1.0]
    assert without_common(found) == {
        "patch_size": patch_size,
        "merge_size": merge_size,
        "max_soft_tokens": 560,
        "start_token_id": 255999,
        "end_token_id": 258882,
    }


def test_areas_of_glm4v_are_those_of_one_frame(tmp_path):
    found = read(tmp_path, "glm4v_moe", {"size": {"shortest_edge": 12544, "longest_edge": 9633792}})
    assert (found.kind, found.image_token_id) == ("glm4v", 151363)
    areas = [found.settings[name] for name in ("min_pixels", "max_pixels")]
    assert areas == [6272, 4816896]


@pytest.mark.parametrize("model_type", ["llava", "llava_next"])
def test_images_of_llava_are_squares_of_one_size(tmp_path, model_type):
    crop = {"crop_size": {"height": 336, "width": 336}, "size": {"shortest_edge": 336}}
    found = read(tmp_path, model_type, crop, vision={"patch_size": 14, "image_size": 336})
    side = "side" if model_type == "llava" else "tile_height"
    assert (found.kind, found.image_token_id) == (model_type, 32000)
    assert (found.settings[side], found.settings["patch_size"]) == (336, 14)
    for change, told in (
        ({"crop_size": {"height": 224, "width": 224}}, "crop_size"),
        ({"do_center_crop": False}, "do_center_crop is False; it must be true"),
    ):
        with pytest.raises(ConfigError, match=told):
            read(tmp_path, model_type, crop | change)


DEFAULTS = [
    ("llava", CLIPImageProcessorPil, {}, {}),
    ("glm4v", Glm4vImageProcessorPil, {}, {}),
    ("qwen2_vl", Qwen2VLImageProcessorPil, {}, {}),
    ("gemma4", Gemma4ImageProcessorPil, {}, {}),
    ("gemma3", Gemma3ImageProcessorPil, {}, {}),
    ("qwen2_5_vl", Qwen2VLImageProcessorPil, {}, {}),
    ("mistral3", PixtralImageProcessorPil, {}, {}),
    ("internvl", GotOcr2ImageProcessorPil, {"image_seq_length": 169}, {}),
    ("llava_onevision", LlavaOnevisionImageProcessorPil, {}, {"patch_size": [14, 14]}),
]


@pytest.mark.parametrize(("model_type", "image_processor", "processor", "vision"), DEFAULTS)
def test_defaults_are_the_ones_of_transformers(
    tmp_path, model_type, image_processor, processor, vision
):
    saved = image_processor().to_dict()
    written = read(tmp_path, model_type, saved, processor, vision)
    (tmp_path / "preprocessor_config.json").unlink()
    assert read(tmp_path, model_type, {}, processor, vision) == written
    (tmp_path / "preprocessor_config.json").unlink()
    nested = {**processor, "image_processor": saved}
    assert read(tmp_path, model_type, None, nested, vision) == written
    assert written.settings["image_mean"] == list(image_processor.image_mean)
    assert written.settings["image_std"] == list(image_processor.image_std)
    assert written.settings["rescale_factor"] == image_processor.rescale_factor


@pytest.mark.parametrize("changes", [{}, {"image_mean": HALF, "image_std": HALF}])
def test_normalized_patches_are_the_ones_of_transformers(tmp_path, changes):
    theirs = Qwen2VLImageProcessorPil(patch_size=16, **changes)
    theirs.save_pretrained(tmp_path)
    found = read(tmp_path, "qwen3_vl")
    image = picture(333, 222)
    text = json.dumps(found.settings)
    processed = ImageProcessor("qwen_vl", text, image_token_id=0, max_patches=2**17).process(image)
    patches = np.frombuffer(processed.patches, np.uint8).reshape(-1, 3, 16 * 16).astype(np.float32)
    mean, std = (np.array(found.settings[name])[:, None] for name in ("image_mean", "image_std"))
    normalized = (patches * found.settings["rescale_factor"] - mean) / std
    expected = np.asarray(theirs(image)["pixel_values"]).reshape(-1, 3, 2, 16 * 16)
    np.testing.assert_allclose(normalized, expected[:, :, 0], atol=1.01 / 255 / std.min())


PUBLISHED_KIMI = {
    "auto_map": {"AutoImageProcessor": "kimi.Processor"},
    "media_proc_cfg": {
        "in_patch_limit": 9000,
        "patch_size": 14,
        "image_mean": HALF,
        "image_std": HALF,
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 300,
    },
}


def test_kimis_published_fields_are_those_of_transformers(tmp_path):
    published = read(tmp_path, "kimi_k25", PUBLISHED_KIMI, media_placeholder_token_id=77)
    assert published.image_token_id == 77
    assert without_common(published) == {
        "patch_size": 14,
        "merge_size": 2,
        "max_own_patches": 9000,
        "max_side_patches": 300,
    }
    size = {"max_height": 300, "max_width": 300}
    image = {"max_patches": 9000, "size": size, "image_processor_type": "Kimi_K25ImageProcessor"}
    assert read(tmp_path, "kimi_k25", image).settings == published.settings


def test_images_of_hy4_are_resized_by_a_bicubic_filter_whatever_its_file_says(tmp_path):
    image = {"resample": 1, "image_processor_type": "HYV4VLImageProcessor"}
    found = read(tmp_path, "hy_v4_vl", image)
    assert (found.kind, found.image_token_id) == ("hy_v4", 120120)
    assert without_common(found) == {
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 1,
        "min_pixels": 512 * 512,
        "max_pixels": 2048 * 2048,
    }
    assert found.settings["resample"] == 3


@pytest.mark.parametrize(
    "size", [[672, 672], None, {"shortest_edge": 3136, "longest_edge": 451584}]
)
def test_the_size_in_published_files_of_minimax_m3_is_passed_over(tmp_path, size):
    image = {"size": size, "image_processor_type": "MiniMaxM3VLImageProcessor"}
    found = read(tmp_path, "minimax_m3_vl", image, image_token_index=77)
    assert (found.kind, found.image_token_id) == ("minimax_m3", 77)
    assert without_common(found) == {
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 3136,
        "max_pixels": 451584,
        "start_token_id": 105,
        "end_token_id": 106,
    }


def test_steps_that_are_left_out_change_nothing(tmp_path):
    image = {**QWEN3_VL, "do_rescale": False, "do_normalize": False, "image_mean": 0.5}
    found = read(tmp_path, "qwen3_vl", image).settings
    assert (found["rescale_factor"], found["image_mean"], found["image_std"]) == (
        1.0,
        [0.0] * 3,
        [1.0] * 3,
    )
    scalar = read(tmp_path, "qwen3_vl", {**QWEN3_VL, "image_mean": 0, "image_std": 0.25}).settings
    assert (scalar["image_mean"], scalar["image_std"]) == ([0.0] * 3, [0.25] * 3)


def test_models_without_images_have_none(tmp_path):
    assert read(tmp_path, "qwen3_vl") is None
    assert read(tmp_path, "llama", QWEN3_VL) is None
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN3_VL))
    assert image_settings(tmp_path, {"model_type": "qwen3_5", "text_config": {}}) is None
    assert image_settings(tmp_path, {}) is None


WRONG = [
    ("qwen3_vl", {"image_processor_type": "CLIPImageProcessor"}, {}, {}, "Qwen2VLImageProcessor"),
    ("qwen3_vl", {"do_resize": False}, {}, {}, "do_resize is False; it must be true"),
    ("qwen3_vl", {"do_center_crop": True}, {}, {}, "do_center_crop is True"),
    ("qwen3_vl", {"size": {"longest_edge": 9}}, {}, {}, "size.shortest_edge is None"),
    ("qwen3_vl", {"size": 5}, {}, {}, "size is 5; it must be an object"),
    ("qwen3_vl", {"patch_size": 16}, {}, {"patch_size": 14}, "patch_size is 14; it must be 16"),
    ("qwen3_vl", {"image_mean": [1, 2]}, {}, {}, "image_mean is .*a number or three"),
    ("qwen3_vl", {"image_std": ["a"] * 3}, {}, {}, "a positive number"),
    ("qwen3_vl", {"resample": "bicubic"}, {}, {}, "resample is 'bicubic'"),
    ("mistral3", MISTRAL3, {"image_break_token": "[ROW]"}, {}, r"no added token '\[ROW\]'"),
    ("mistral3", MISTRAL3, {"patch_size": 16}, {"patch_size": 14}, "patch_size is 14"),
    ("internvl", INTERNVL, {"image_seq_length": 255}, {}, "image_seq_length is 255"),
    ("internvl", INTERNVL, {}, {"patch_size": [14, 16]}, "the same number"),
    ("llava_onevision", LLAVA, {"num_image_tokens": 5}, {"patch_size": 14}, "it must be 729"),
    ("llava_onevision", LLAVA, {"vision_aspect_ratio": "pad"}, {}, "anyres_max_ and a number"),
    ("llava_onevision", LLAVA, {"vision_feature_select_strategy": "default"}, {}, '"full"'),
    ("llava_onevision", {"image_grid_pinpoints": [[384, 400]]}, {}, {}, "in tiles"),
    ("kimi_k25", {"media_proc_cfg": {"fixed_output_tokens": 9}}, {}, {}, "it must be null"),
    ("kimi_k25", {"size": {"max_height": 9, "max_width": 8}}, {}, {}, "one number for both"),
    ("kimi_k25", {"merge_size": 3}, {}, {}, "merge_kernel_size is None; it must be 3 twice"),
]


@pytest.mark.parametrize(("model_type", "image", "processor", "vision", "reason"), WRONG)
def test_other_steps_are_refused_by_name(tmp_path, model_type, image, processor, vision, reason):
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path, model_type, image, processor, vision)


def test_a_damaged_tokenizer_is_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text("{}")
    config = {"model_type": "internvl", "vision_config": {}}
    with pytest.raises(ModelFolderError, match="cannot be read"):
        image_settings(tmp_path, config)
    (tmp_path / "tokenizer.json").write_text("[")
    with pytest.raises(ConfigError, match="is not JSON"):
        image_settings(tmp_path, config)


def test_an_image_token_is_an_id(tmp_path):
    with pytest.raises(ConfigError, match="image_token_id is 'x'"):
        read(tmp_path, "qwen3_vl", QWEN3_VL, image_token_id="x")
