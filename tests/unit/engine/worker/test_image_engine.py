"""Prompts with images under the real scheduler and runner give transformers' tokens."""

import os
import signal

import numpy as np
import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.loading.loader import load_model
from services.engine.config.images import pages_of
from services.engine.request import SamplingParams
from services.engine.worker.inputs.dummy_steps import dummy_batch
from services.engine.worker.start.warm_up import run_small_steps
from tests.support.compilation import compilation_config
from tests.support.eagle3_checkpoints import write_eagle3_head
from tests.support.graph_engine import GraphEngine
from tests.support.image_prompts import (
    NUM_TEXT_TOKENS,
    Prompt,
    prompt_images,
    random_picture,
    reference_logits,
)
from tests.support.mtp_checkpoints import add_draft_layer
from tests.support.random_checkpoints import write_checkpoint
from tests.support.ranks_core import ranks_config, ranks_core
from tests.support.vision_variants import EVERY_VARIANT, VARIANTS, write_vision_checkpoint
from tests.support.waiting import until

NUM_OUTPUT = 8
NUM_PROMPTS = 4


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """Returns a function from a variant to its folder, our model, prompts and their tokens."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            reference = write_vision_checkpoint(folder, name)
            model = load_model(
                folder, device=torch.device("cpu"), dtype=torch.float32, sees_images=True
            )
            prompts = some_prompts(model, VARIANTS[name].grids)
            expected = [tokens_of(reference, model, prompt) for prompt in prompts]
            made[name] = folder, model, prompts, expected
        return made[name]

    return get


def some_prompts(model, grids):
    """Prompts of text, of one image and of several; some begin alike, with other images."""
    pictures = [random_picture(model, grid, seed) for seed, grid in enumerate(grids)]
    other = random_picture(model, grids[0], seed=77)
    first = Prompt.of(model, pictures[:1], seed=1)
    changed = Prompt(first.token_ids, [other], first.offsets)
    text = Prompt([5, 6, 7, 8, 9], [], [])
    return [first, Prompt.of(model, pictures, seed=2), changed, text]


def tokens_of(reference, model, prompt):
    """The greedy continuation by transformers, each token from the whole sequence."""
    token_ids = list(prompt.token_ids)
    for _ in range(NUM_OUTPUT):
        whole = Prompt(token_ids, prompt.pictures, prompt.offsets)
        if prompt.pictures:
            logits = reference_logits(reference, model, whole)
        else:
            with torch.inference_mode():
                logits = reference(torch.tensor([token_ids])).logits[0]
        token_ids.append(int(logits[-1, :NUM_TEXT_TOKENS].argmax()))
    return token_ids[len(prompt.token_ids) :]


def run(engine, model, prompts):
    return engine.run(
        [prompt.token_ids for prompt in prompts],
        NUM_OUTPUT,
        images=[prompt_images(model, prompt) for prompt in prompts],
        banned_token_ids=frozenset(range(NUM_TEXT_TOKENS, model.config.vocab_size)),
    )


def engine_for(folder, level=0, mode=CUDAGraphMode.NONE, **sizes):
    config = compilation_config(level=level, cudagraph_mode=mode)
    sizes = {"max_model_len": 256, "num_encoder_pages": 8, "max_num_batched_tokens": 64} | sizes
    engine = GraphEngine(folder, config, **sizes)
    engine.capture()
    assert not engine.faults
    return engine


@pytest.mark.parametrize("variant", EVERY_VARIANT)
@pytest.mark.parametrize(
    ("level", "mode", "max_num_batched_tokens"),
    [
        (0, CUDAGraphMode.NONE, 64),
        (0, CUDAGraphMode.NONE, 5),
        (3, CUDAGraphMode.FULL_AND_PIECEWISE, 64),
        (3, CUDAGraphMode.FULL_AND_PIECEWISE, 7),
    ],
)
def test_the_tokens_are_those_of_transformers(seeing, variant, level, mode, max_num_batched_tokens):
    folder, model, prompts, expected = seeing(variant)
    most = max(max_num_batched_tokens, VARIANTS[variant].least_step)
    engine = engine_for(folder, level, mode, max_num_batched_tokens=most)
    assert run(engine, model, prompts) == expected
    # Now prefixes with images are cached, and images encoded.
    assert run(engine, model, prompts[::-1]) == expected[::-1]


@pytest.mark.parametrize("variant", EVERY_VARIANT)
def test_few_blocks_and_pages_change_nothing(seeing, variant):
    folder, model, prompts, expected = seeing(variant)
    longest = max(len(prompt.token_ids) for prompt in prompts) + NUM_OUTPUT
    largest = max(model.visual.num_vectors(grid) for grid in VARIANTS[variant].grids)
    engine = engine_for(
        folder,
        num_blocks=2 + (longest // 4 + 4) * len(set(model.config.sliding_windows)),
        num_states=3,
        num_encoder_pages=max(2, pages_of(largest)),
        max_num_batched_tokens=max(11, VARIANTS[variant].least_step),
        max_encoder_tokens=1,
    )
    for _ in range(3):
        assert run(engine, model, prompts) == expected


def test_dummy_steps_see_no_images_of_the_step_before(seeing):
    folder, model, prompts, _ = seeing("qwen3_vl")
    engine = engine_for(folder)
    [first, *_] = prompts
    engine.run([first.token_ids], 1, images=[prompt_images(model, first)])
    forward = engine.runner.forward
    index = forward.images.fixed["image_index"]
    assert (index >= 0).any()
    dummy_row = engine.limits.max_num_seqs
    one = dummy_batch(np.array([0, 1]), np.array([1]), dummy_row, is_prefill=False)
    forward.reset_for(one)
    assert (index < 0).all()


@pytest.mark.parametrize("variant", ["qwen3_vl", "qwen3_5"])
def test_drafts_change_nothing(seeing, variant):
    folder, model, prompts, expected = seeing(variant)
    drafts = {"num_speculative_tokens": 2, "lookup_sizes": (1, 2)}
    engine = engine_for(folder, num_blocks=200, num_states=8, max_num_batched_tokens=9, **drafts)
    for _ in range(2):
        assert run(engine, model, prompts) == expected


@pytest.mark.parametrize("variant", ["qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL_AND_PIECEWISE], ids=str)
@pytest.mark.parametrize("source", ["head", "head in three axes", "blind model"])
def test_drafts_of_a_head_or_a_model_change_nothing(seeing, tmp_path, variant, mode, source):
    folder, model, prompts, expected = seeing(variant)
    draft = tmp_path / "draft"
    if source == "blind model":
        write_checkpoint(
            draft, "qwen3", vocab_size=model.config.vocab_size, max_position_embeddings=256
        )
    else:
        scaling = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
        own = {"rope_scaling": scaling} if source == "head in three axes" else {}
        write_eagle3_head(draft, folder, **own)
    engine = engine_for(
        folder, 3, mode, draft_model=draft, num_speculative_tokens=2, num_blocks=200, num_states=8,
        max_num_batched_tokens=9,
    )  # fmt: skip
    for _ in range(2):
        assert run(engine, model, prompts) == expected


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL_AND_PIECEWISE], ids=str)
def test_drafts_of_a_draft_layer_change_nothing(seeing, tmp_path, mode):
    folder, model, prompts, expected = seeing("qwen3_5")
    target = tmp_path / "drafting"
    add_draft_layer(folder, target)
    engine = engine_for(
        target, 3, mode, num_speculative_tokens=2, num_blocks=200, num_states=8,
        max_num_batched_tokens=9,
    )  # fmt: skip
    for _ in range(2):
        assert run(engine, model, prompts) == expected


RANKS, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        pytest.param("qwen3_vl", RANKS, id="ranks"),
        pytest.param("qwen3_vl", STAGES, id="stages"),
        *(
            pytest.param(name, RANKS, id=f"ranks-{name}", marks=pytest.mark.families)
            for name, row in VARIANTS.items()
            if name != "qwen3_vl" and row.text["num_attention_heads"] % 2 == 0
        ),
    ],
)
async def test_ranks_and_stages_give_the_same_tokens(seeing, variant, layout):
    folder, model, prompts, expected = seeing(variant)
    sampling = SamplingParams(
        temperature=0.0,
        seed=0,
        max_tokens=NUM_OUTPUT,
        banned_token_ids=frozenset(range(NUM_TEXT_TOKENS, model.config.vocab_size)),
    )
    config = ranks_config(folder, max_model_len=256, encoder_cache_tokens=256, **layout)
    async with ranks_core(config) as ranks:
        for _ in range(2):
            tokens = await ranks.generate(
                [prompt.token_ids for prompt in prompts],
                sampling,
                [prompt_images(model, prompt, ranks.patches) for prompt in prompts],
            )
            assert tokens == expected


@pytest.mark.parametrize(
    "layout",
    [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}],
    ids=["alone", "ranks", "stages"],
)
async def test_workers_compile_and_capture_the_encoder(seeing, tmp_path, layout):
    folder, model, prompts, expected = seeing("qwen3_vl")
    sampling = SamplingParams(
        temperature=0.0,
        seed=0,
        max_tokens=NUM_OUTPUT,
        banned_token_ids=frozenset(range(NUM_TEXT_TOKENS, model.config.vocab_size)),
    )
    config = ranks_config(
        folder,
        max_model_len=256,
        encoder_cache_tokens=256,
        compilation_level=3,
        use_inductor=False,
        cudagraph_mode="full_and_piecewise",
        cudagraph_capture_sizes=[2, 8],
        cudagraph_encoder_sizes=[32, 256],
        capture_while_serving=False,
        compile_cache_dir=tmp_path,
        **layout,
    )
    async with ranks_core(config) as ranks:
        tokens = await ranks.generate(
            [prompt.token_ids for prompt in prompts],
            sampling,
            [prompt_images(model, prompt) for prompt in prompts],
        )
        counters = ranks.core.counters
        assert tokens == expected
        assert counters.images_by_run == {"graph": counters.scheduler.num_encoded_images}


async def test_a_lost_worker_encodes_again(seeing):
    folder, model, prompts, expected = seeing("qwen3_vl")
    sampling = SamplingParams(
        temperature=0.0,
        seed=0,
        max_tokens=NUM_OUTPUT,
        banned_token_ids=frozenset(range(NUM_TEXT_TOKENS, model.config.vocab_size)),
    )
    async with ranks_core(ranks_config(folder, max_model_len=256)) as ranks:
        sinks = [
            ranks.submit(prompt.token_ids, sampling, prompt_images(model, prompt, ranks.patches))
            for prompt in prompts
        ]
        await until(lambda: any(sink.token_ids for sink in sinks))
        os.kill(ranks.executors[0].pid, signal.SIGKILL)
        for sink, tokens in zip(sinks, expected, strict=True):
            assert (await sink.wait_for_end()).error is None
            assert sink.token_ids == tokens


def test_kernels_of_tokens_that_see_later_ones_are_built_before_serving(seeing):
    folder, model, prompts, expected = seeing("gemma3")
    engine = engine_for(folder)
    images, seen = engine.runner.forward.images, []
    metadata = images.metadata

    def noted(*args, **options):
        seen.append(metadata(*args, **options))
        return seen[-1]

    images.metadata = noted
    run_small_steps(engine.runner, engine.limits, [(2, 2), (3,)])
    key_ends = [None if each.key_ends is None else each.key_ends.tolist() for each in seen]
    assert key_ends == [None, [1, 2, 1, 2], None]
    assert run(engine, model, prompts) == expected


def test_an_image_that_is_cached_with_its_prefix_is_not_encoded_again(seeing):
    folder, model, prompts, expected = seeing("qwen3_vl")
    engine = engine_for(folder)
    encoded = []

    def noted(images, encode=engine.runner.encoder.encode):
        encoded.extend(images)
        return encode(images)

    engine.runner.encoder.encode = noted
    long = prompts[1]
    run(engine, model, [long])
    assert len(encoded) == len(long.pictures)
    assert run(engine, model, [long]) == [expected[1]]
    assert len(encoded) == len(long.pictures)
