"""Recordings of requests with images are replayed, whenever the images were encoded."""

import pytest
import torch

from models.cudagraph_mode import CUDAGraphMode
from models.loading.loader import load_model
from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.core.snapshot import PendingSnapshot
from services.engine.replay.recording import ReplayError
from services.engine.request import Request, SamplingParams
from tests.support.compilation import compilation_config
from tests.support.engine_harness import RecordingSink
from tests.support.graph_engine import GraphEngine
from tests.support.image_prompts import Prompt, prompt_images, random_picture
from tests.support.recordings import engine_settings, write_recording
from tests.support.vision_variants import VARIANTS, write_vision_checkpoint
from tests.unit.engine.replay.test_replay_of_states import run

SIZES = {
    "max_model_len": 256, "block_size": 4, "max_num_batched_tokens": 16, "num_blocks": 200,
    "num_encoder_pages": 8,
}  # fmt: skip
GRAPHS = compilation_config(
    cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY, cudagraph_capture_sizes=(4,)
)


VARIANT = "qwen3_vl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    write_vision_checkpoint(folder, VARIANT)
    return folder


def record(folder, target, *, first_step, variant=VARIANT, has_images=True):
    """Runs the same prompts twice; records from a step on."""
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32, sees_images=True)
    pictures = [random_picture(model, grid) for grid in VARIANTS[variant].grids]
    prompts = [Prompt.of(model, pictures[:1], seed=1), Prompt.of(model, pictures, seed=2)]
    sizes = SIZES | {"max_num_batched_tokens": max(16, VARIANTS[variant].least_step)}
    engine = GraphEngine(folder, GRAPHS, **sizes)
    engine.capture()
    opening, steps, images = Snapshot(next_step_id=1), [], {}
    for number in range(4):
        prompt = prompts[number % 2]
        engine.scheduler.add(
            Request(
                request_id=str(number), handle=number, prompt_token_ids=prompt.token_ids,
                images=noted(prompt_images(model, prompt), images), sink=RecordingSink(),
                arrival_s=0.0, sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=6),
            )
        )  # fmt: skip
        while engine.scheduler.has_work:
            if engine.scheduler.next_step_id == first_step:
                opening = PendingSnapshot(
                    engine.scheduler.running, next_step_id=first_step, num_in_flight=0
                ).message()
            step = engine.scheduler.schedule()
            result = engine.runner.execute(step.descriptor).message()
            engine.scheduler.update(step, result)
            if step.step_id >= first_step:
                steps.append((step.descriptor, result))
    opening.engine.CopyFrom(engine_settings(folder, engine.limits, num_blocks=SIZES["num_blocks"]))
    own = images.values() if has_images else ()
    return write_recording(target / "trace.binpb", steps, snapshot=opening, images=own)


def noted(prompt_images, images):
    images |= {each.image.digest: each.image for each in prompt_images}
    return tuple(prompt_images)


@pytest.mark.parametrize("against", ["eager", "full", "invariant"])
def test_an_honest_recording_shows_no_difference(folder, tmp_path, against):
    trace = record(folder, tmp_path, first_step=1)
    totals, report = run(trace, folder, against, encoder_cache_tokens=256)
    assert totals.is_clean, report
    assert totals.num_steps > 20


@pytest.mark.parametrize("first_step", [2, 3, 6, 14])
@pytest.mark.parametrize("against", ["eager", "full", "invariant"])
def test_images_from_before_the_recording_are_encoded_again(folder, tmp_path, first_step, against):
    trace = record(folder, tmp_path, first_step=first_step)
    totals, report = run(trace, folder, against, encoder_cache_tokens=256)
    assert totals.is_clean, report
    assert totals.num_rebuilt_tokens > 0


def test_images_whose_tokens_see_later_ones_are_computed_whole(tmp_path):
    write_vision_checkpoint(tmp_path, "gemma3")
    trace = record(tmp_path, tmp_path, first_step=8, variant="gemma3")
    totals, report = run(trace, tmp_path, "eager", encoder_cache_tokens=256)
    assert totals.is_clean, report
    assert totals.num_rebuilt_tokens > 0


def test_a_recording_without_its_images_is_refused(folder, tmp_path):
    trace = record(folder, tmp_path, first_step=6, has_images=False)
    with pytest.raises(ReplayError, match="that the recording does not have"):
        run(trace, folder, "eager", encoder_cache_tokens=256)
