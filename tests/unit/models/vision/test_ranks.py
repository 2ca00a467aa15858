"""Ranks and stages that share a model compute what one process does, images included."""

import pytest
import torch

from models.forward_context import forward_context
from models.loading.loader import load_model
from models.parallel.group import ParallelGroup, PipelineStage
from tests.support.gloo_ranks import run_commands
from tests.support.image_prompts import ImageRunner, Prompt, reference_logits
from tests.support.tensor_parallel_rank import pictures_of

CPU = torch.device("cpu")
CHUNK = 7
VARIANTS = ["qwen3_vl", pytest.param("qwen3_5_moe", marks=pytest.mark.families)]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_give_the_logits_of_transformers(
    vision_pair, vision_checkpoint, tmp_path, variant
):
    model, reference = vision_pair(variant)
    folder, _ = vision_checkpoint(variant)
    outputs = [tmp_path / f"logits_{rank}.pt" for rank in range(2)]
    run_commands(
        ["tests.support.tensor_parallel_rank", str(rank), "2", str(folder),
         str(tmp_path / "rendezvous"), str(output), "images"]
        for rank, output in enumerate(outputs)
    )  # fmt: skip
    expected = reference_logits(reference, model, Prompt.of(model, pictures_of(model)))
    for output in outputs:
        assert_close(torch.load(output), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_stages_give_the_logits_of_transformers(vision_pair, vision_checkpoint, variant):
    model, reference = vision_pair(variant)
    prompt = Prompt.of(model, pictures_of(model))
    stages = [ParallelGroup(stage=PipelineStage(rank=rank, size=2)) for rank in range(2)]
    folder, _ = vision_checkpoint(variant)
    models = [
        load_model(folder, device=CPU, dtype=torch.float32, group=group, sees_images=True)
        for group in stages
    ]
    runners = [ImageRunner(each, [prompt]) for each in models]
    pieces = []
    for start in range(0, len(prompt.token_ids), CHUNK):
        size = min(CHUNK, len(prompt.token_ids) - start)
        given = None
        for runner in runners:
            (sequence,) = runner.sequences
            runner._grow(sequence, start + size)
            input_ids, context = runner.prepare([(sequence, size)])
            with forward_context(context), torch.inference_mode():
                given = input_ids if given is None else given
                given = runner.model(given, context.context.positions)
            sequence.num_cached += size
        with torch.inference_mode():
            pieces.append(models[-1].compute_logits(given))
    assert_close(torch.cat(pieces), reference_logits(reference, model, prompt))
