"""Prompts with images, for our model and for transformers' of the same checkpoint."""

import hashlib
import math
import random
from dataclasses import dataclass, replace

import torch

from models.config_sections.gemma_towers import (
    Gemma3VisionConfig,
    Gemma4ImageConfig,
    Gemma4UnifiedVisionConfig,
)
from models.config_sections.hy_v4_tower import HyV4VisionConfig
from models.config_sections.kimi_tower import KimiVisionConfig
from models.config_sections.llava_towers import LlavaVisionConfig
from models.config_sections.towers import (
    InternVLVisionConfig,
    PixtralVisionConfig,
)
from models.config_sections.vision import MutualLayers, QwenVisionConfig
from models.forward_context import ForwardContext, ImageMetadata
from models.layers.decoder import CausalLM
from models.vision.patch_layout import squares_first
from models.vision.rope_positions import image_rope_positions
from services.engine.patch_memory import PatchMemory
from services.engine.prompt_image import EncoderImage, PromptImage
from tests.support.paged_runner import PagedRunner, Sequence

NUM_TEXT_TOKENS = 90
"""Tokens below are text in every variant."""


@dataclass(frozen=True)
class Picture:
    """An image as the encoder takes it: its grid, and its patches, [N, 3 * P * P] uint8."""

    grid: tuple[int, ...]
    patches: torch.Tensor


def random_picture(model: CausalLM, grid: tuple[int, ...], seed: int = 0) -> Picture:
    """Returns an image of noise."""
    config = model.config.vision
    num_patches = math.prod(grid[:3])
    generator = torch.Generator().manual_seed(seed)
    shape = (num_patches, 3 * config.patch_size**2)
    return Picture(grid, torch.randint(256, shape, generator=generator, dtype=torch.uint8))


def reference_inputs(model: CausalLM, pictures: list[Picture]) -> dict[str, torch.Tensor]:
    """Returns the same images as transformers' model takes them."""
    config = model.config.vision
    colours = config.colours
    mean, std = (torch.tensor(each).view(3, 1) for each in (colours.mean, colours.std))
    scaled = [
        (each.patches.unflatten(1, (3, -1)).float() * colours.factor - mean) / std
        for each in pictures
    ]
    if isinstance(config, QwenVisionConfig):
        frames = torch.cat(scaled).unsqueeze(2).expand(-1, -1, config.num_frames, -1)
        grids = torch.tensor([(1, *each.grid) for each in pictures])
        return {"pixel_values": frames.flatten(1), "image_grid_thw": grids}
    if isinstance(config, HyV4VisionConfig):
        grids = torch.tensor([(1, *each.grid) for each in pictures])
        return {"pixel_values": torch.cat(scaled).flatten(1), "image_grid_thw": grids}
    if isinstance(config, KimiVisionConfig):
        side, grids = config.patch_size, torch.tensor([(1, *each.grid) for each in pictures])
        rows = [
            each[_row_by_row(picture.grid, config.merge)]
            for each, picture in zip(scaled, pictures, strict=True)
        ]
        pixels = torch.cat(rows).unflatten(2, (side, side))
        return {"pixel_values": pixels, "image_grid_thw": grids}
    if isinstance(config, Gemma4ImageConfig):
        return _gemma4_inputs(config, pictures)
    images = [_pixels(each, picture.grid) for each, picture in zip(scaled, pictures, strict=True)]
    if isinstance(config, PixtralVisionConfig):
        sizes = torch.tensor([each.shape[-2:] for each in images])
        return {"pixel_values": _stacked(images).squeeze(1), "image_sizes": sizes}
    if isinstance(config, InternVLVisionConfig | Gemma3VisionConfig | LlavaVisionConfig):
        return {"pixel_values": torch.cat(images)}
    sizes = torch.tensor([each.grid[3:] for each in pictures])
    return {"pixel_values": _stacked(images), "image_sizes": sizes}


def _row_by_row(grid: tuple[int, ...], side: int) -> torch.Tensor:
    """Returns the numbers, in squares of side x side, of patches that come row by row."""
    rows, columns = torch.from_numpy(squares_first(*grid, side))
    return (rows * grid[1] + columns).argsort()


def _gemma4_inputs(config, pictures: list[Picture]) -> dict[str, torch.Tensor]:
    """Returns patches pixel by pixel, and column and row of each, padded to the longest image."""
    longest = max(len(each.patches) for each in pictures)
    values = torch.zeros(len(pictures), longest, 3 * config.patch_size**2)
    places = torch.full((len(pictures), longest, 2), -1)
    for number, each in enumerate(pictures):
        count = len(each.patches)
        scaled = each.patches.unflatten(1, (3, -1)).transpose(1, 2).flatten(1) / 255
        values[number, :count] = scaled
        height, width = each.grid
        rows, columns = torch.arange(height), torch.arange(width)
        places[number, :count] = torch.cartesian_prod(rows, columns).flip(1)
    return {"pixel_values": values, "image_position_ids": places}


def _pixels(patches: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    """Maps patches that come row by row, [N, 3, P * P], to tiles, [tiles, 3, height, width]."""
    height, width = grid[-2:] if len(grid) == 2 else grid[1:3]
    side = math.isqrt(patches.shape[-1])
    tiles = patches.view(-1, height, width, 3, side, side).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(-1, 3, height * side, width * side)


def _stacked(images: list[torch.Tensor]) -> torch.Tensor:
    """Stacks images, [tiles, 3, height, width], padded at their ends to the largest of each."""
    sizes = torch.tensor([each.shape for each in images]).amax(dim=0).tolist()
    stacked = torch.zeros(len(images), *sizes)
    for target, each in zip(stacked, images, strict=True):
        tiles, _, height, width = each.shape
        target[:tiles, :, :height, :width] = each
    return stacked


@dataclass
class Prompt:
    """Token ids with the tokens of images, and where they begin."""

    token_ids: list[int]
    pictures: list[Picture]
    offsets: list[int]

    @classmethod
    def of(cls, model: CausalLM, pictures: list[Picture], seed: int = 0) -> "Prompt":
        """Makes a prompt of random text around images."""
        order = random.Random(seed)
        token_ids, offsets = [], []
        for picture in pictures:
            token_ids += order.choices(range(NUM_TEXT_TOKENS), k=order.randint(1, 9))
            offsets.append(len(token_ids))
            token_ids += [model.config.vision.image_token_id] * model.visual.num_vectors(
                picture.grid
            )
        token_ids += order.choices(range(NUM_TEXT_TOKENS), k=order.randint(1, 9))
        return cls(token_ids, pictures, offsets)


def prompt_images(
    model: CausalLM, prompt: Prompt, memory: PatchMemory | None = None
) -> list[PromptImage]:
    """Returns a prompt's images as the engine's requests have them, all in `memory` if it is given.

    Each keeps its room there until it is gone.
    """
    images = []
    for offset, picture in zip(prompt.offsets, prompt.pictures, strict=True):
        patches = picture.patches.numpy().tobytes()
        count = model.visual.num_vectors(picture.grid)
        digest = hashlib.sha256(patches + repr(picture.grid).encode()).digest()
        image = EncoderImage.joined([patches], digest=digest, grid=picture.grid, memory=memory)
        assert (image.place is None) == (memory is None)
        images.append(PromptImage(image=image, offset=offset, num_tokens=count, num_vectors=count))
    return images


class ImageRunner(PagedRunner):
    """Runs sequences with images; their vectors are encoded once, all sequences' together."""

    def __init__(self, model: CausalLM, prompts: list[Prompt], **options) -> None:
        super().__init__(model, **options)
        pictures = [each for prompt in prompts for each in prompt.pictures]
        with torch.inference_mode():
            self.rows = model.visual(
                torch.cat([each.patches for each in pictures]), [each.grid for each in pictures]
            )
        self._index, self._positions, self._key_ends = {}, {}, {}
        self._num_rows = 0
        self.sequences = [self._add(prompt) for prompt in prompts]

    def add(self, token_ids: list[int]) -> Sequence:
        """Takes a row for a new sequence of text."""
        return self._add(Prompt(token_ids, [], []))

    def _add(self, prompt: Prompt) -> Sequence:
        sequence = super().add(prompt.token_ids)
        index = torch.full((len(prompt.token_ids),), -1, dtype=torch.int32)
        images = []
        key_ends = torch.arange(1, 1 + len(prompt.token_ids), dtype=torch.int32)
        for offset, picture in zip(prompt.offsets, prompt.pictures, strict=True):
            count = self.model.visual.num_vectors(picture.grid)
            index[offset : offset + count] = torch.arange(self._num_rows, self._num_rows + count)
            self._num_rows += count
            if self._mutual_layers is not MutualLayers.NONE:
                key_ends[offset : offset + count] = offset + count
            images.append((offset, count, picture.grid))
        self._index[sequence.row], self._key_ends[sequence.row] = index, key_ends
        if self.model.config.rope.axes:
            sides = self.model.config.vision.sides
            laid_out = [(offset, count, sides(grid)) for offset, count, grid in images]
            self._positions[sequence.row] = image_rope_positions(len(index), laid_out)
        return sequence

    @property
    def _mutual_layers(self) -> MutualLayers:
        return self.model.config.vision.mutual_layers

    def step(self, chunks: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Computes the next n tokens of each sequence; those of a mutual image all or none."""
        return super().step([(each, self._whole(each, length)) for each, length in chunks])

    def _whole(self, sequence: Sequence, length: int) -> int:
        """Returns at least `length`, so that a chunk ends where the keys of its last query do."""
        last = sequence.num_cached + length - 1
        ends = self._key_ends[sequence.row]
        return length if last >= len(ends) else int(ends[last]) - sequence.num_cached

    def prepare(self, chunks: list[tuple[Sequence, int]]) -> tuple[torch.Tensor, ForwardContext]:
        """Returns the input ids, and the forward context with the images of a step."""
        input_ids, context = super().prepare(chunks)
        index, positions, key_ends = [], [], []
        for sequence, length in chunks:
            span = torch.arange(sequence.num_cached, sequence.num_cached + length)
            stored = self._index[sequence.row]
            is_new = span >= len(stored)
            known = span.clamp(max=len(stored) - 1)
            index.append(stored[known].masked_fill(is_new, -1))
            key_ends.append(torch.where(is_new, span + 1, self._key_ends[sequence.row][known]))
            if sequence.row in self._positions:
                at, delta = self._positions[sequence.row]
                at = torch.from_numpy(at)[:, known]
                positions.append(torch.where(is_new, span + delta, at))
        metadata = ImageMetadata(
            rows=self.rows,
            index=torch.cat(index),
            rope_positions=torch.cat(positions, dim=1) if positions else None,
            key_ends=torch.cat(key_ends),
            only_windows_see_later=self._mutual_layers is MutualLayers.WINDOWS,
        )
        return input_ids, replace(context, image_metadata=metadata)


def reference_logits(reference, model: CausalLM, prompt: Prompt) -> torch.Tensor:
    """Returns transformers' logits of a whole prompt with its images, [length, vocab] float32."""
    token_ids = torch.tensor([prompt.token_ids])
    is_image = token_ids == model.config.vision.image_token_id
    inputs = reference_inputs(model, prompt.pictures)
    if model.config.rope.axes or isinstance(model.config.vision, Gemma4ImageConfig):
        inputs["mm_token_type_ids"] = is_image.int()
    if model.config.vision.mutual_layers is MutualLayers.ALL:
        inputs["token_type_ids"] = is_image.int()
    if isinstance(model.config.vision, Gemma4UnifiedVisionConfig):
        # Called plainly, it has images see later tokens in all layers; not where it generates.
        inputs["attention_mask"] = reference.create_masks_for_generate(
            reference.config,
            inputs_embeds=reference.get_input_embeddings()(token_ids),
            attention_mask=None,
            cache=None,
            position_ids=None,
            mm_token_type_ids=inputs["mm_token_type_ids"],
        )
    with torch.inference_mode():
        return reference(token_ids, **inputs).logits[0].float()
