"""Patches and tokens equal those of transformers' processors, which run on Pillow too."""

import hashlib
import importlib
import json
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.hy_v4_vl.image_processing_pil_hy_v4_vl import HYV4VLImageProcessorPil
from transformers.models.hy_v4_vl.processing_hy_v4_vl import HYV4VLProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.minimax_m3_vl.processing_minimax_m3_vl import MiniMaxM3VLProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from services.frontend.errors import InvalidRequestError
from services.frontend.images.processor import ImageProcessor, ProcessedImage
from services.frontend.images.settings import ImageSettingsError
from tests.support.image_settings import IMAGE_TOKEN_ID, settings_text

SIZES = [
    (1, 1),
    (27, 29),
    (56, 56),
    (333, 77),
    (640, 480),
    (449, 897),
    (1000, 1),
    (1601, 1203),
    (2400, 300),
]
"""Widths and heights."""
RAW = {"do_rescale": False, "do_normalize": False}
SPELLINGS = {"I": IMAGE_TOKEN_ID, "B": 8, "E": 9}


@pytest.fixture
def pixtral_processor(monkeypatch) -> type:
    # The processor imports a size function from a module that needs torchvision; Pillow's has it.
    module = "transformers.models.pixtral.image_processing_pixtral"
    monkeypatch.setitem(sys.modules, module, image_processing_pil_pixtral)
    found = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    return found.PixtralProcessor


def picture(size: tuple[int, int]) -> Image.Image:
    generator = np.random.default_rng(size[0])
    coarse = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC))
    noise = generator.integers(0, 32, smooth.shape, dtype=np.uint8)
    return Image.fromarray(smooth // 8 * 7 + noise)


def processor(kind: str, max_patches: int = 2**17, **changes) -> ImageProcessor:
    text = settings_text(kind, **changes)
    return ImageProcessor(kind, text, image_token_id=IMAGE_TOKEN_ID, max_patches=max_patches)


def patches_of(processed: ProcessedImage, patch_size: int) -> np.ndarray:
    values = np.frombuffer(processed.patches, np.uint8)
    return values.reshape(-1, 3, patch_size, patch_size)


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(ours.astype(np.int16) - theirs.astype(np.int16)).max() <= 1


def cut(pixels: np.ndarray, patch_size: int) -> np.ndarray:
    """Cuts [C, H, W] into patches in raster order."""
    rows, columns = pixels.shape[1] // patch_size, pixels.shape[2] // patch_size
    pixels = pixels[:, : rows * patch_size, : columns * patch_size]
    split = pixels.reshape(3, rows, patch_size, columns, patch_size)
    return split.transpose(1, 3, 0, 2, 4).reshape(-1, 3, patch_size, patch_size)


@pytest.mark.parametrize("patch_size", [14, 16])
@pytest.mark.parametrize("size", [size for size in SIZES if size != (1000, 1)])
def test_qwen_vl_equals_transformers(size, patch_size):
    image = picture(size)
    processed = processor("qwen_vl", patch_size=patch_size).process(image)
    theirs = Qwen2VLImageProcessorPil(patch_size=patch_size)(image, **RAW)
    pixels = np.asarray(theirs["pixel_values"]).reshape(-1, 3, 2, patch_size, patch_size)
    for frame in range(2):
        assert_close(patches_of(processed, patch_size), pixels[:, :, frame])
    assert [1, *processed.grid] == np.asarray(theirs["image_grid_thw"])[0].tolist()
    assert processed.tokens == (IMAGE_TOKEN_ID,) * (len(pixels) // 4)


@pytest.mark.parametrize("size", [size for size in SIZES if size != (1000, 1)])
@pytest.mark.parametrize("longest_edge", [28 * 28 * 15000, 700_000])
def test_glm4v_equals_transformers(size, longest_edge):
    image = picture(size)
    processed = processor("glm4v", max_pixels=longest_edge // 2).process(image)
    area = {"shortest_edge": 112 * 112, "longest_edge": longest_edge}
    theirs = Glm4vImageProcessorPil(size=area)(image, **RAW)
    pixels = np.asarray(theirs["pixel_values"]).reshape(-1, 3, 2, 14, 14)
    assert_close(patches_of(processed, 14), pixels[:, :, 0])
    assert [1, *processed.grid] == np.asarray(theirs["image_grid_thw"])[0].tolist()
    assert processed.tokens == (IMAGE_TOKEN_ID,) * (len(pixels) // 4)


@pytest.mark.parametrize("size", [(1, 1), (333, 77), (1601, 1203)])
def test_hy4_equals_transformers(size):
    image = picture(size)
    processed = processor("hy_v4").process(image)
    theirs = HYV4VLImageProcessorPil()(image, **RAW)
    pixels = np.asarray(theirs["pixel_values"]).reshape(-1, 3, 16, 16)
    assert_close(patches_of(processed, 16), pixels)
    assert [1, *processed.grid] == np.asarray(theirs["image_grid_thw"])[0].tolist()
    num_tokens = HYV4VLProcessor._num_frame_tokens(*processed.grid, 2)
    assert processed.tokens == (IMAGE_TOKEN_ID,) * num_tokens


@pytest.mark.parametrize("limit", [8, 40, 1000])
def test_hy4_stays_below_the_engines_limit_of_tokens(limit):
    for size in [size for size in SIZES if size != (1000, 1)]:
        processed = processor("hy_v4", limit).process(picture(size))
        assert len(processed.tokens) * 4 <= limit or min(processed.grid) == 2


@pytest.mark.parametrize("size", [(1, 1), (333, 77), (1601, 1203)])
def test_minimax_m3_equals_transformers(size):
    """Its image processor is Qwen2-VL's with other areas; it has none on Pillow of its own."""
    image = picture(size)
    processed = processor("minimax_m3", min_pixels=4 * 28 * 28).process(image)
    area = {"shortest_edge": 4 * 28 * 28, "longest_edge": 451584}
    theirs = Qwen2VLImageProcessorPil(size=area)(image, **RAW)
    pixels = np.asarray(theirs["pixel_values"]).reshape(-1, 3, 2, 14, 14)
    assert_close(patches_of(processed, 14), pixels[:, :, 0])
    assert [1, *processed.grid] == np.asarray(theirs["image_grid_thw"])[0].tolist()
    text_processor = object.__new__(MiniMaxM3VLProcessor)
    text_processor.image_processor = SimpleNamespace(merge_size=2)
    text_processor.IMAGE_TOKEN = "I"
    text_processor.VISION_START_TOKEN, text_processor.VISION_END_TOKEN = "BE"
    text = text_processor.replace_image_token(
        {"image_grid_thw": np.array([[1, *processed.grid]])}, 0
    )
    assert processed.tokens == tuple(SPELLINGS[letter] for letter in text)


@pytest.mark.parametrize("size", [size for size in SIZES if size != (1000, 1)])
@pytest.mark.parametrize(("longest_edge", "merge_size"), [(1540, 2), (256, 1)])
def test_pixtral_equals_transformers(size, longest_edge, merge_size, pixtral_processor):
    image = picture(size)
    ours = processor(
        "pixtral", max_height=longest_edge, max_width=longest_edge, merge_size=merge_size
    )
    processed = ours.process(image)
    theirs = image_processing_pil_pixtral.PixtralImageProcessorPil(
        size={"longest_edge": longest_edge}
    )(image, patch_size=14 * merge_size, **RAW)
    assert_close(patches_of(processed, 14), cut(np.asarray(theirs["pixel_values"])[0], 14))
    text_processor = object.__new__(pixtral_processor)
    text_processor.patch_size, text_processor.spatial_merge_size = 14, merge_size
    text_processor.image_token, text_processor.image_break_token = "I", "B"
    text_processor.image_end_token = "E"
    sizes = {"image_sizes": np.asarray(theirs["image_sizes"])}
    text = text_processor.replace_image_token(sizes, 0)
    assert processed.tokens == tuple(SPELLINGS[letter] for letter in text)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("max_patches", "longest"), [(16384, 512), (300, 512), (16384, 20)])
def test_kimi_shrinks_and_fills_up_as_its_formula_says(size, max_patches, longest):
    """transformers has no processor on Pillow; its formula is written down again."""
    image = picture(size)
    ours = processor("kimi", max_own_patches=max_patches, max_side_patches=longest)
    width, height = size
    num_own = max(1.0, height // 14) * max(1.0, width // 14)
    most = longest * 14
    scale = min(1.0, (max_patches / num_own) ** 0.5, most / height, most / width)
    height, width = (min(max(1, int(side * scale)), most) for side in (height, width))
    whole = np.zeros((-(-height // 28) * 28, -(-width // 28) * 28, 3), np.uint8)
    whole[:height, :width] = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    processed = ours.process(image)
    rows, columns = (side // 14 for side in whole.shape[:2])
    assert processed.grid == (rows, columns)
    assert processed.tokens == (IMAGE_TOKEN_ID,) * (rows * columns // 4)
    patches = cut(whole.transpose(2, 0, 1), 14).reshape(rows // 2, 2, columns // 2, 2, 3, 14, 14)
    by_window = patches.swapaxes(1, 2).reshape(-1, 3, 14, 14)
    assert np.array_equal(patches_of(processed, 14), by_window)


@pytest.mark.parametrize("limit", [4, 40, 1000])
def test_kimi_stays_below_the_engines_limit(limit):
    for size in SIZES:
        patches = processor("kimi", 2**17).patches(picture(size), max_patches=limit)
        rows, columns = patches.grid
        assert len(patches.values) == rows * columns <= max(limit, 4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("min_tiles", "max_tiles"), [(1, 12), (2, 6), (1, 1)])
def test_internvl_equals_transformers(size, min_tiles, max_tiles):
    image = picture(size)
    processed = processor("internvl", min_tiles=min_tiles, max_tiles=max_tiles).process(image)
    theirs = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, min_patches=min_tiles, max_patches=max_tiles
    )(image, crop_to_patches=True, **RAW)
    pixels = np.concatenate([cut(np.asarray(tile), 14) for tile in theirs["pixel_values"]])
    assert_close(patches_of(processed, 14), pixels)
    assert processed.grid == (len(theirs["pixel_values"]), 32, 32)
    text_processor = object.__new__(InternVLProcessor)
    text_processor.start_image_token, text_processor.end_image_token = "B", "E"
    text_processor.image_token, text_processor.image_seq_length = "I", 256
    text = text_processor.replace_image_token({"num_patches": theirs["num_patches"]}, 0)
    assert processed.tokens == tuple(SPELLINGS[letter] for letter in text)


@pytest.mark.parametrize("size", SIZES)
def test_gemma3_equals_transformers(size):
    changes = {"resample": 2, "tile_height": 896, "tile_width": 896, "max_tiles": 1}
    image = picture(size)
    processed = processor("internvl", **changes).process(image)
    theirs = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})(image, **RAW)
    [pixels] = theirs["pixel_values"]
    assert_close(patches_of(processed, 14), cut(np.asarray(pixels), 14))
    assert processed.grid == (1, 64, 64)
    assert processed.tokens == (8, *(IMAGE_TOKEN_ID,) * 256, 9)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_soft_tokens", [70, 280])
def test_gemma4_equals_transformers(size, max_soft_tokens):
    image = picture(size)
    processed = processor("gemma4", max_soft_tokens=max_soft_tokens).process(image)
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=max_soft_tokens)(image, do_rescale=False)
    places = np.asarray(theirs["image_position_ids"])[0]
    count = (places[:, 0] >= 0).sum()
    pixels = np.asarray(theirs["pixel_values"])[0, :count].reshape(-1, 16, 16, 3)
    assert_close(patches_of(processed, 16), pixels.transpose(0, 3, 1, 2))
    assert processed.grid == tuple(1 + places[:count].max(axis=0)[::-1])
    [num_tokens] = theirs["num_soft_tokens_per_image"]
    assert processed.tokens == (8, *(IMAGE_TOKEN_ID,) * num_tokens, 9)


def test_gemma4_unified_has_patches_of_whole_squares():
    image = picture((640, 480))
    small, large = processor("gemma4"), processor("gemma4", patch_size=48, merge_size=1)
    one, other = small.process(image), large.process(image)
    assert one.tokens == other.tokens
    assert tuple(3 * each for each in other.grid) == one.grid
    whole = patches_of(other, 48).reshape(*other.grid, 3, 48, 48).transpose(2, 0, 3, 1, 4)
    pixels = whole.reshape(3, 48 * other.grid[0], -1)
    assert np.array_equal(cut(pixels, 16), patches_of(one, 16))


@pytest.mark.parametrize("size", [size for size in SIZES if size != (1000, 1)])
def test_llava_equals_transformers(size):
    image = picture(size)
    processed = processor("llava").process(image)
    sizes = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    [pixels] = CLIPImageProcessorPil(**sizes)(image, **RAW)["pixel_values"]
    assert_close(patches_of(processed, 14), cut(np.asarray(pixels), 14))
    assert processed.grid == (1, 24, 24)
    assert processed.tokens == (IMAGE_TOKEN_ID,) * 576


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_only_image", [True, False])
def test_llava_next_equals_transformers(size, is_only_image):
    image = picture(size)
    processed = processor("llava_next").process(image, is_only_image=is_only_image)
    sizes = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    theirs_processor = LlavaNextImageProcessorPil(**sizes)
    theirs = theirs_processor(image, **RAW)
    tiles = np.asarray(theirs["pixel_values"])[0]
    assert_close(patches_of(processed, 14), np.concatenate([cut(tile, 14) for tile in tiles]))
    assert processed.grid == (len(tiles), 24, 24, image.height, image.width)
    text_processor = object.__new__(LlavaNextProcessor)
    text_processor.image_processor, text_processor.image_token = theirs_processor, "I"
    text_processor.patch_size, text_processor.num_additional_image_tokens = 14, 1
    text_processor.vision_feature_select_strategy = "default"
    text = text_processor.replace_image_token(dict(theirs), 0)
    assert processed.tokens == (IMAGE_TOKEN_ID,) * len(text)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_only_image", [True, False])
def test_llava_onevision_equals_transformers(size, is_only_image):
    image = picture(size)
    processed = processor("llava_onevision").process(image, is_only_image=is_only_image)
    theirs_processor = LlavaOnevisionImageProcessorPil()
    theirs = theirs_processor([image] if is_only_image else [[image, image]], **RAW)
    tiles = np.asarray(theirs["pixel_values"])[0]
    assert_close(patches_of(processed, 14), np.concatenate([cut(tile, 14) for tile in tiles]))
    assert processed.grid == (len(tiles), 27, 27, image.height, image.width)
    text_processor = object.__new__(LlavaOnevisionProcessor)
    text_processor.image_processor, text_processor.image_token = theirs_processor, "I"
    text_processor.num_image_tokens, text_processor.vision_aspect_ratio = 729, "anyres_max_9"
    text_processor.vision_feature_select_strategy = "full"
    text = text_processor.replace_image_token(dict(theirs), 0)
    assert processed.tokens == (IMAGE_TOKEN_ID,) * len(text)


@pytest.mark.parametrize("kind", ["qwen_vl", "pixtral", "internvl", "llava_onevision"])
def test_images_shrink_to_fewer_patches(kind):
    images = [picture(size) for size in [(2000, 1500), (900, 900), (8, 8), (1500, 40)]]
    whole = [processor(kind).process(image) for image in images]
    limit = {"qwen_vl": 300, "pixtral": 300, "internvl": 5000, "llava_onevision": 3000}[kind]
    for image, full in zip(images, whole, strict=True):
        lowered = processor(kind).process(image, max_patches=limit)
        assert lowered == processor(kind, max_patches=limit).process(image)
        assert len(lowered.patches) <= min(limit * 3 * 14 * 14, len(full.patches))
        assert len(lowered.tokens) <= len(full.tokens)


@pytest.mark.parametrize("kind", ["qwen_vl", "pixtral", "internvl", "llava_onevision"])
def test_an_engine_that_takes_no_image_at_all_is_refused(kind):
    with pytest.raises(ImageSettingsError, match="the engine takes 1"):
        processor(kind, max_patches=1)
    smallest = processor(kind).process(picture((800, 600)), max_patches=1)
    assert len(smallest.patches) <= 1024 * 3 * 14 * 14


def test_long_images_that_no_area_holds_are_refused():
    with pytest.raises(InvalidRequestError, match="over 200 times as long"):
        processor("qwen_vl").process(picture((1000, 1)))
    with pytest.raises(InvalidRequestError, match=r"becomes \d+ patches; the limit is 16"):
        processor("qwen_vl", max_patches=16).process(picture((1900, 11)))


def test_the_digest_covers_settings_grid_and_patches():
    image = picture((300, 200))
    text = settings_text("qwen_vl")
    processed = processor("qwen_vl").process(image)
    assert processed.digest == (
        hashlib.sha256(
            struct.pack("<Q", len(text))
            + text.encode()
            + struct.pack("<III", 2, *processed.grid)
            + processed.patches
        ).digest()
    )
    other = processor("qwen_vl", image_mean=[0.5, 0.5, 0.5]).process(image)
    assert other.patches == processed.patches
    assert other.digest != processed.digest


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        ("qwen_vl", (3, 4)),
        ("qwen_vl", (4,)),
        ("qwen_vl", (0, 4)),
        ("pixtral", (2, 3)),
        ("internvl", (1, 32, 31)),
        ("llava_onevision", (2, 27, 26, 5, 5)),
        ("llava_onevision", (4, 27, 27, 384, 384)),
        ("qwen_vl", (4, 4)),
    ],
)
def test_impossible_grids_are_not_assembled(kind, grid):
    with pytest.raises(ValueError, match=r"grid|bytes of patches"):
        processor(kind).assemble(grid, b"1")


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("gemma", "{}", "unknown kind of image processor 'gemma'"),
        ("qwen_vl", "{}", "patch_size: Field required"),
        ("qwen_vl", "[", "Invalid JSON"),
        ("qwen_vl", settings_text("qwen_vl", sharpen=True), "sharpen: Extra inputs"),
        ("qwen_vl", settings_text("qwen_vl", patch_size=0), "patch_size: Input should be"),
        ("pixtral", json.dumps({"patch_size": 2**20}), "patch_size: Input should be"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(kind, text, reason):
    with pytest.raises(ImageSettingsError, match=reason):
        ImageProcessor(kind, text, image_token_id=1, max_patches=2**20)
