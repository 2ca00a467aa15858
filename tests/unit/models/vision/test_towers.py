"""Vectors of images, and logits of prompts with them, equal transformers'."""

import pytest
import torch

from tests.support.image_prompts import (
    ImageRunner,
    Prompt,
    random_picture,
    reference_inputs,
    reference_logits,
)


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def reference_features(reference, inputs):
    """Returns transformers' vectors of all images, those of each level beside each other."""
    with torch.inference_mode():
        output = reference.model.get_image_features(**inputs, return_dict=True)
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return torch.cat([torch.cat(tuple(level)) for level in levels], dim=-1)


def encoded(model, pictures):
    with torch.inference_mode():
        return model.visual(
            torch.cat([each.patches for each in pictures]), [each.grid for each in pictures]
        )


def test_one_image_has_the_vectors_of_transformers(seeing, grids):
    model, reference = seeing
    for grid in grids:
        picture = random_picture(model, grid)
        vectors = encoded(model, [picture])
        assert len(vectors) == model.visual.num_vectors(grid)
        assert vectors.shape[1] == model.config.vision.num_features
        expected = reference_features(reference, reference_inputs(model, [picture]))
        assert_close(vectors, expected)


def test_several_images_have_the_vectors_of_transformers(seeing, grids):
    model, reference = seeing
    pictures = [random_picture(model, grid, seed) for seed, grid in enumerate((*grids, grids[0]))]
    expected = reference_features(reference, reference_inputs(model, pictures))
    assert_close(encoded(model, pictures), expected)


@pytest.mark.parametrize("chunk_size", [200, 5])
def test_prompts_with_images_have_the_logits_of_transformers(seeing, grids, chunk_size):
    model, reference = seeing
    pictures = [random_picture(model, grid, seed) for seed, grid in enumerate(grids)]
    prompts = [Prompt.of(model, pictures[:1]), Prompt.of(model, pictures, seed=1)]
    runner = ImageRunner(model, prompts, num_blocks=128)
    for sequence, prompt in zip(runner.sequences, prompts, strict=True):
        logits = runner.run(sequence, chunk_size)
        assert_close(logits, reference_logits(reference, model, prompt))


def test_tokens_after_images_are_those_of_transformers(seeing, grids):
    model, reference = seeing
    prompt = Prompt.of(model, [random_picture(model, grids[0])])
    runner = ImageRunner(model, [prompt])
    (sequence,) = runner.sequences
    logits = runner.run(sequence, 7)
    seen = [logits]
    for _ in range(6):
        sequence.token_ids.append(int(logits[-1].argmax()) % 90)
        logits = runner.step([(sequence, 1)])[0]
        seen.append(logits)
    whole = Prompt(sequence.token_ids, prompt.pictures, prompt.offsets)
    assert_close(torch.cat(seen), reference_logits(reference, model, whole))


@pytest.mark.families
def test_images_among_several_have_an_overview_alone(vision_pair):
    model, reference = vision_pair("llava_onevision_odd")
    side = model.config.vision.side
    pictures = [random_picture(model, (1, side, side, 40, 30), seed) for seed in range(2)]
    inputs = reference_inputs(model, pictures) | {"batch_num_images": torch.tensor([2])}
    vectors = encoded(model, pictures)
    assert len(vectors) == 2 * model.visual.num_vectors(pictures[0].grid) == 2 * (side**2 + 1)
    assert_close(vectors, reference_features(reference, inputs))
