"""Positions in time, height and width equal those of transformers."""

import pytest
import torch

from models.vision.rope_positions import image_rope_positions
from tests.support.image_prompts import Prompt, random_picture

LAYOUTS = [[], [(4, 6)], [(2, 10), (8, 2)], [(2, 2), (6, 6), (4, 6)]]


@pytest.mark.parametrize("grids", LAYOUTS)
def test_positions_and_delta_are_those_of_transformers(sectioned, grids):
    model, reference = sectioned
    prompt = Prompt.of(model, [random_picture(model, grid) for grid in grids], seed=3)
    token_ids = torch.tensor([prompt.token_ids])
    is_image = token_ids == model.config.vision.image_token_id
    expected, expected_delta = reference.model.get_rope_index(
        token_ids,
        mm_token_type_ids=is_image.int(),
        image_grid_thw=torch.tensor([(1, *grid) for grid in grids]) if grids else None,
    )
    images = [
        (offset, model.visual.num_vectors(grid), model.config.vision.sides(grid))
        for offset, grid in zip(prompt.offsets, grids, strict=True)
    ]
    positions, delta = image_rope_positions(len(prompt.token_ids), images)
    assert positions.tolist() == expected[:, 0].tolist()
    assert delta == expected_delta.item()


def test_a_prompt_may_end_or_begin_with_an_image():
    positions, delta = image_rope_positions(6, [(0, 6, (2, 3))])
    assert positions.tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    assert delta == 3 - 6


def test_tokens_that_do_not_fit_a_grid_are_refused():
    with pytest.raises(ValueError, match="2 x 3 vectors has 5 tokens"):
        image_rope_positions(6, [(0, 5, (2, 3))])
