"""Ranks and stages encode images by graphs, and count them."""

import pytest
import torch

from models.loading.loader import load_model
from services.engine.request import SamplingParams
from tests.support.image_prompts import Prompt, prompt_images, random_picture
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.vision_variants import VARIANTS, write_vision_checkpoint

VARIANT = "qwen3_vl_moe"
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=6)
GRAPHS = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": [2, 4],
    "cudagraph_encoder_sizes": [16, 100],
    "capture_while_serving": False,
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A checkpoint, prompts, and what puts their images into memory of the workers."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp(VARIANT)
    write_vision_checkpoint(folder, VARIANT)
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32, sees_images=True)
    pictures = [
        random_picture(model, grid, seed) for seed, grid in enumerate(VARIANTS[VARIANT].grids)
    ]
    prompts = [
        Prompt.of(model, shown, seed) for seed, shown in enumerate((pictures[:1], pictures[1:]))
    ]
    return (
        folder,
        [prompt.token_ids for prompt in prompts],
        lambda memory: [prompt_images(model, each, memory) for each in prompts],
    )


async def run(seeing, **options):
    folder, prompts, images = seeing
    sizes = {"encoder_cache_tokens": 512, "num_kv_blocks": 128, "max_model_len": 128}
    async with ranks_core(ranks_config(folder, **sizes, **options)) as ranks:
        tokens = await ranks.generate(prompts, GREEDY, images(ranks.patches))
        figures = [each for each in ranks.core.stats().graphs.figures if each.is_encoder]
        return tokens, dict(ranks.core.counters.images_by_run), figures


@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel_size": 2, "enable_expert_parallel": True},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
    ids=["DP 2", "TP 2", "PP 2"],
)
async def test_ranks_and_stages_encode_images_by_graphs(seeing, options):
    expected, without, _ = await run(seeing, enforce_eager=True)
    assert without == {"eager": 3}
    tokens, runs, figures = await run(seeing, **GRAPHS, **options)
    assert (tokens, runs) == (expected, {"graph": 3})
    assert [each.key.num_tokens for each in figures] == [100, 16]
    assert sum(each.num_replays for each in figures) in (1, 2)
