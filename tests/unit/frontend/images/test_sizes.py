"""Sizes, arrangements and numbers of tokens equal those of transformers for many shapes."""

import numpy as np
import pytest
from transformers.image_processing_utils import select_best_resolution
from transformers.image_utils import ChannelDimension
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from services.frontend.images.families.internvl import InternVL
from services.frontend.images.families.llava_onevision import LlavaOnevision
from services.frontend.images.families.pixtral import Pixtral
from services.frontend.images.families.qwen_vl import QwenVL
from tests.support.image_settings import SETTINGS

UNLIMITED = 2**24


def shapes(number: int, longest: int = 9000) -> list[tuple[int, int]]:
    """Returns heights and widths, small ones as often as large ones."""
    generator = np.random.default_rng(7)
    sides = np.exp(generator.uniform(0, np.log(longest), (number, 2))).astype(int)
    return [(int(height), int(width)) for height, width in sides]


@pytest.mark.parametrize(
    ("patch_size", "min_pixels", "max_pixels"),
    [(14, 3136, 1003520), (16, 65536, 16777216), (14, 1003520, 1003520)],
)
def test_qwen_vl(patch_size, min_pixels, max_pixels):
    changes = {"patch_size": patch_size, "min_pixels": min_pixels, "max_pixels": max_pixels}
    family = QwenVL(**(SETTINGS["qwen_vl"] | changes))
    for height, width in shapes(800):
        if max(height, width) > 200 * min(height, width):
            continue
        theirs = smart_resize(height, width, 2 * patch_size, min_pixels, max_pixels)
        assert family.resized_size(height, width, max_patches=UNLIMITED) == theirs


@pytest.mark.parametrize(("height", "width"), [(1540, 1540), (300, 900)])
def test_pixtral(height, width):
    family = Pixtral(**(SETTINGS["pixtral"] | {"max_height": height, "max_width": width}))
    for shape in shapes(800):
        if min(shape) < max(shape[0] / height, shape[1] / width):
            continue  # there a side of such an image has no pixels
        image = np.broadcast_to(np.uint8(0), (*shape, 3))
        theirs = get_resize_output_image_size(image, (height, width), 28, ChannelDimension.LAST)
        assert family.resized_size(*shape, max_patches=UNLIMITED) == theirs


@pytest.mark.parametrize(("min_tiles", "max_tiles"), [(1, 12), (3, 7), (6, 6)])
def test_internvl(min_tiles, max_tiles):
    changes = {"min_tiles": min_tiles, "max_tiles": max_tiles}
    family = InternVL(**(SETTINGS["internvl"] | changes))
    for shape in [*shapes(500), (448, 448), (1000, 1000), (300, 600), (600, 300), (2000, 1000)]:
        theirs = get_optimal_tiled_canvas(shape, (448, 448), min_tiles, max_tiles)
        assert family.arrangement(*shape, max_patches=UNLIMITED) == theirs


def test_llava_onevision():
    family = LlavaOnevision(**SETTINGS["llava_onevision"])
    theirs = object.__new__(LlavaOnevisionProcessor)
    theirs.image_processor = LlavaOnevisionImageProcessorPil()
    theirs.num_image_tokens, theirs.vision_aspect_ratio = 729, "anyres_max_9"
    for shape in shapes(1000, longest=5000):
        best = select_best_resolution(shape, theirs.image_processor.image_grid_pinpoints)
        if best is None:
            continue  # there a side of such an image has no pixels
        assert family.best_resolution(*shape) == best
        num_tiles = 1 + best[0] // 384 * (best[1] // 384)
        tokens = family.token_ids((num_tiles, 27, 27, *shape), 0)
        assert len(tokens) == theirs._get_number_of_features(*shape, 384, 384)


@pytest.mark.parametrize("max_patches", [4, 100, 1024, 5000])
def test_lower_limits_hold_for_ordinary_shapes(max_patches):
    qwen_vl, pixtral = QwenVL(**SETTINGS["qwen_vl"]), Pixtral(**SETTINGS["pixtral"])
    for height, width in shapes(1000):
        if max(height, width) > 4 * min(height, width):
            continue
        for family in (qwen_vl, pixtral):
            rows, columns = family.resized_size(height, width, max_patches=max_patches)
            assert rows // 14 * (columns // 14) <= max(max_patches, 16)
