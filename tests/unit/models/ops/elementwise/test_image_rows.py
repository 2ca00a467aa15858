"""Vectors of images in the residual stream, and rotations by three positions."""

from contextlib import contextmanager

import pytest
import torch

from models.config_sections.rope import RopeConfig
from models.forward_context import ForwardContext, ImageMetadata, forward_context
from models.layers.rotary import RotaryEmbedding
from models.ops.elementwise.image_rows import add_image_rows, write_image_rows

T, H = 5, 6
INDEX = torch.tensor([-1, 2, 0, -1, 2, 1, -1], dtype=torch.int32)
"""Rows of more tokens than the pass has."""
POSITIONS = torch.tensor([9, 10, 11, 12, 13])


@contextmanager
def images(**fields):
    given = {"rows": torch.empty(0, H), "index": None, "rope_positions": None, **fields}
    metadata = ImageMetadata(**given) if fields else None
    context = ForwardContext(
        context=None, attn_metadata=None, kv_cache_data=[], image_metadata=metadata
    )
    with forward_context(context):
        yield


def test_tokens_of_images_get_the_rows_of_their_level_and_text_keeps_its_bits():
    rows, hidden = torch.randn(3, 3 * H), torch.randn(T, H)
    written, added = hidden.clone(), hidden.clone()
    with images(rows=rows, index=INDEX):
        write_image_rows(written)
        add_image_rows(added, 2)
    for token, row in enumerate(INDEX[:T].tolist()):
        is_text = row < 0
        assert torch.equal(written[token], hidden[token] if is_text else rows[row, :H])
        expected = hidden[token] if is_text else hidden[token] + rows[row, 2 * H :]
        assert torch.equal(added[token], expected)


@pytest.mark.parametrize("fields", [{}, {"rows": torch.randn(3, 3 * H)}])
def test_passes_without_images_change_nothing(fields):
    hidden = torch.randn(T, H)
    before = hidden.clone()
    with images(**fields):
        write_image_rows(hidden)
        add_image_rows(hidden, 1)
    assert torch.equal(hidden, before)


def rotary_of(axes, partial=1.0):
    rope = RopeConfig(theta=1e4, partial_rotary_factor=partial)
    with_axes = RopeConfig(theta=1e4, partial_rotary_factor=partial, axes=axes)
    return RotaryEmbedding(12, 32, rope), RotaryEmbedding(12, 32, with_axes)


def test_text_is_rotated_bit_for_bit_as_without_sections():
    plain, sections = rotary_of((0, 1, 2, 0, 1, 0))
    expected = plain(POSITIONS)
    same = POSITIONS.expand(3, -1)
    for fields in ({}, {"rope_positions": same}, {"rope_positions": same.repeat(1, 2)}):
        with images(**fields):
            rotation = sections(POSITIONS)
        assert torch.equal(rotation.cos, expected.cos)
        assert torch.equal(rotation.signed_sin, expected.signed_sin)


def test_each_pair_turns_by_the_position_of_its_axis():
    axes = (0, 2, 1)
    plain, sections = rotary_of(axes, partial=0.5)
    places = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5], [0, 20, 11, 12, 13]])
    with images(rope_positions=places):
        rotation = sections(POSITIONS)
    for found, table in zip(rotation[:2], plain.table.chunk(2, dim=-1), strict=True):
        assert found.shape == (T, 1, 12)
        for column in range(12):
            pair = column % 6
            at = places[axes[pair] if pair < 3 else 0]
            assert torch.equal(found[:, 0, column], table[at, 0, column])
