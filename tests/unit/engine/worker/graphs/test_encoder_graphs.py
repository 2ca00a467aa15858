"""The encoder of images as captured graphs, under the real scheduler and runner."""

import pytest
import torch

from models.batch_invariance import use_batch_invariance
from models.cudagraph_mode import CUDAGraphMode, GraphKind
from models.loading.loader import load_model
from services.engine.compilation.graphs.recorder import GraphFaultError
from services.engine.core.stats import Counters
from tests.support.compilation import compilation_config
from tests.support.graph_engine import GraphEngine
from tests.support.image_prompts import NUM_TEXT_TOKENS, Prompt, prompt_images, random_picture
from tests.support.vision_variants import EVERY_VARIANT, VARIANTS, write_vision_checkpoint

NUM_OUTPUT = 6
SIZES = (32, 64, 100)
GRAPHS = CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """Returns a function from a variant to its folder, model and prompts."""
    made = {}

    def get(name):
        if name not in made:
            torch.set_num_threads(1)
            folder = tmp_path_factory.mktemp(name)
            write_vision_checkpoint(folder, name)
            model = load_model(
                folder, device=torch.device("cpu"), dtype=torch.float32, sees_images=True
            )
            grids = VARIANTS[name].grids
            pictures = [random_picture(model, grid, seed) for seed, grid in enumerate(grids)]
            prompts = [
                Prompt.of(model, pictures[:1], seed=1),
                Prompt.of(model, pictures[1:], seed=2),
                Prompt([5, 6, 7, 8, 9], [], []),
            ]
            made[name] = folder, model, prompts
        return made[name]

    return get


def engine_for(folder, mode=GRAPHS, sizes=SIZES, **options):
    config = compilation_config(
        cudagraph_mode=mode, cudagraph_capture_sizes=[2, 8], cudagraph_encoder_sizes=list(sizes)
    )
    limits = {"max_model_len": 256, "max_num_batched_tokens": 64, "num_blocks": 200}
    return GraphEngine(folder, config, num_encoder_pages=16, **{**limits, **options})


def run(engine, model, prompts):
    return engine.run(
        [prompt.token_ids for prompt in prompts],
        NUM_OUTPUT,
        images=[prompt_images(model, prompt) for prompt in prompts],
        banned_token_ids=frozenset(range(NUM_TEXT_TOKENS, model.config.vocab_size)),
    )


def counts(engine):
    counters = Counters()
    for descriptor, result in engine.steps:
        counters.count(descriptor, result)
    return dict(counters.images_by_run)


def encoder_keys(engine):
    return [key for key in engine.prepared.graphs.planned if key.kind is GraphKind.ENCODER]


@pytest.mark.parametrize("variant", EVERY_VARIANT)
def test_graphs_give_the_tokens_of_eager(seeing, variant):
    folder, model, prompts = seeing(variant)
    unit = model.config.vision.patch_unit
    num_images = sum(len(prompt.pictures) for prompt in prompts)
    eager = engine_for(folder, CUDAGraphMode.NONE)
    expected = run(eager, model, prompts)
    assert counts(eager) == {"eager": num_images}
    largest = sum(len(each.patches) for prompt in prompts for each in prompt.pictures)
    engine = engine_for(folder, sizes=(unit, largest // 2, largest + 70))
    outcomes = engine.capture()
    assert not [outcome.fault for outcome in outcomes if outcome.fault]
    assert run(engine, model, prompts) == expected
    assert counts(engine) == {"graph": num_images}
    figures = [each for each in engine.ledger.figures if each.is_encoder]
    computed = sum(each.num_replays * each.key.num_tokens for each in figures)
    padded = sum(each.padded_tokens for each in figures)
    assert computed - padded == largest


def test_images_too_large_for_all_graphs_run_without_one(seeing):
    folder, model, prompts = seeing("qwen3_vl")
    expected = run(engine_for(folder, CUDAGraphMode.NONE), model, prompts)
    engine = engine_for(folder, sizes=[4, 16])
    engine.capture()
    assert run(engine, model, prompts) == expected
    assert counts(engine).keys() == {"eager", "graph"} or counts(engine) == {"eager": 3}


def test_a_missed_graph_is_captured_first_and_serves_then(seeing):
    folder, model, prompts = seeing("qwen3_vl")
    engine = engine_for(folder)
    run(engine, model, prompts[:1])
    assert counts(engine) == {"eager": 1}
    key = engine.prepared.graphs.next_pending
    assert (key.kind, key.num_tokens) in {(GraphKind.ENCODER, 32), (GraphKind.DECODE, 2)}
    engine.capture()
    engine.steps.clear()
    changed = Prompt(prompts[0].token_ids, [random_picture(model, (4, 6), 9)], prompts[0].offsets)
    run(engine, model, [changed])
    assert counts(engine) == {"graph": 1}


def test_a_bad_graph_is_given_up_and_the_image_encoded_without_it(seeing):
    folder, model, prompts = seeing("qwen3_vl")
    expected = run(engine_for(folder, CUDAGraphMode.NONE), model, prompts)
    engine = engine_for(folder)
    engine.capture()
    graphs = engine.prepared.graphs

    def moved(key, batch):
        raise GraphFaultError("planted")

    graphs._families[GraphKind.ENCODER].replay = moved
    assert run(engine, model, prompts) == expected
    assert counts(engine) == {"eager": 3}
    assert {fault.key.kind for fault in engine.faults} == {GraphKind.ENCODER}


@pytest.mark.parametrize(
    ("mode", "sizes", "expected"),
    [
        (CUDAGraphMode.NONE, SIZES, []),
        (CUDAGraphMode.FULL_DECODE_ONLY, SIZES, []),
        (CUDAGraphMode.PIECEWISE, SIZES, [100, 64, 32]),
        (CUDAGraphMode.FULL, [], []),
        (CUDAGraphMode.FULL, [30, 31], [32]),
    ],
)
def test_the_mode_and_the_flag_decide_on_the_graphs(seeing, mode, sizes, expected):
    folder, _, _ = seeing("qwen3_vl")
    keys = encoder_keys(engine_for(folder, mode, sizes))
    assert [key.num_tokens for key in keys] == expected


def test_in_batch_invariant_mode_images_are_encoded_one_at_a_time(seeing, monkeypatch):
    folder, model, prompts = seeing("qwen3_vl")
    use_batch_invariance(is_on=True)
    try:
        engine = engine_for(folder)
        assert not encoder_keys(engine)
        encoded, tower = [], engine.model.visual
        encode = tower.encode
        monkeypatch.setattr(
            tower, "encode", lambda *args: (encoded.append(len(args[0])), encode(*args))[1]
        )
        engine.run([prompts[1].token_ids], 1, images=[prompt_images(model, prompts[1])])
    finally:
        use_batch_invariance(is_on=False)
    assert encoded == [len(each.patches) for each in prompts[1].pictures]
    assert counts(engine) == {"eager": len(encoded)}


def test_a_model_loaded_for_text_has_none(seeing):
    folder, _, _ = seeing("qwen3_vl")
    config = compilation_config(cudagraph_mode=GRAPHS, cudagraph_capture_sizes=[2])
    assert not encoder_keys(GraphEngine(folder, config))
