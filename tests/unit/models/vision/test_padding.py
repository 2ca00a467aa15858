"""Padding of an encoder changes nothing, and the layout of patches is the same with it."""

import numpy as np
import pytest
import torch

from models.vision import patch_layout
from tests.support.image_prompts import random_picture


def encode(tower, pictures, num_patches, noise):
    """Vectors of images in a program of a number of patches, the others of any content."""
    generator = torch.Generator().manual_seed(noise)
    shape = (num_patches, tower.config.patch_bytes)
    patches = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    own = torch.cat([each.patches for each in pictures])
    patches[: len(own)] = own
    grids = [each.grid for each in pictures]
    layout = tower.pad(tower.lay_out(grids), num_patches)
    assert layout.shape == (len(tower.layout_rows), num_patches)
    with torch.inference_mode():
        return tower.arrange(tower.encode(patches, torch.from_numpy(layout)), grids)


@pytest.mark.parametrize("num_units", [0, 1, 33])
def test_padding_changes_no_vector(seeing, grids, num_units):
    tower = seeing[0].visual
    unit = tower.config.patch_unit
    pictures = [random_picture(seeing[0], grid, seed) for seed, grid in enumerate(grids)]
    for shown in ([pictures[0]], pictures, [*pictures[::-1], pictures[0]]):
        count = sum(len(each.patches) for each in shown)
        with torch.inference_mode():
            alone = torch.cat([tower(each.patches, [each.grid]) for each in shown])
        padded = encode(tower, shown, count + num_units * unit, noise=1)
        assert padded.shape == alone.shape
        assert (padded - alone).abs().max() <= 1e-5 * alone.abs().max()
        assert torch.equal(padded, encode(tower, shown, count + num_units * unit, noise=2))


def test_padding_alone_is_finite(seeing):
    tower = seeing[0].visual
    count = 70 * tower.config.patch_unit
    layout = torch.from_numpy(tower.pad(tower.lay_out([]), count))
    patches = torch.zeros(count, tower.config.patch_bytes, dtype=torch.uint8)
    with torch.inference_mode():
        assert tower.encode(patches, layout).isfinite().all()


def test_segments_of_padding_are_short_and_end_with_it(seeing, grids):
    tower = seeing[0].visual
    if "start" not in tower.layout_rows:
        pytest.skip("its segments are tiles")
    layout = tower.lay_out(grids)
    padded = tower.pad(layout, layout.shape[1] + 150)
    assert np.array_equal(padded[:, : layout.shape[1]], layout)
    facts = dict(zip(tower.layout_rows, padded, strict=True))
    starts, ends = facts["start"], facts["end"]
    rows = np.arange(padded.shape[1])
    assert ((starts <= rows) & (rows < ends)).all()
    assert (ends[-150:] - starts[-150:]).max() == 64
    assert starts[-150:].min() == layout.shape[1]
    assert ends.max() == padded.shape[1]


def test_what_is_remembered_of_grids_stays_small():
    layouts = [patch_layout._of_image, patch_layout._of_windows]
    largest = (256, 256, 2)  # 16,384 vectors, the most of an image by default
    sizes = [layouts[0](*largest, (4,)).nbytes, layouts[1](*largest, 4).nbytes]
    most = sum(
        size * layout.cache_info().maxsize for size, layout in zip(sizes, layouts, strict=True)
    )
    assert most <= 256 * 2**20
