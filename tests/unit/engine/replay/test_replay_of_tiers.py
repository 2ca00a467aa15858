"""Recordings of engines whose blocks came back from the host's memory."""

import pytest

from protos.engine.v1.recording_pb2 import Snapshot
from services.engine.request import Request, SamplingParams
from tests.support.engine_harness import RecordingSink
from tests.support.graph_engine import GraphEngine
from tests.support.random_checkpoints import write_checkpoint
from tests.support.recordings import engine_settings, write_recording
from tests.unit.engine.replay.test_replay_of_states import GRAPHS, LONG, run

CASES = {
    "qwen3": {"num_blocks": 16},
    "falcon_h1": {"num_blocks": 20, "num_states": 4},
}
PROMPTS = [LONG[start : start + 100] for start in (0, 20, 40, 60)]


@pytest.mark.parametrize("variant", CASES)
def test_an_honest_recording_shows_no_difference(tmp_path, variant):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_checkpoint(folder, variant, max_position_embeddings=256)
    sizes = {"max_model_len": 256, "block_size": 16, "max_num_batched_tokens": 64}
    engine = GraphEngine(
        folder, GRAPHS, num_host_slots=400, max_step_loads=20, **sizes, **CASES[variant]
    )
    engine.capture()
    steps = []
    for index, prompt in enumerate(PROMPTS * 2):
        engine.scheduler.add(
            Request(
                request_id=f"{index}", handle=index, prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=5),
                sink=RecordingSink(), arrival_s=0.0,
            )
        )  # fmt: skip
        while engine.scheduler.has_work:
            step = engine.scheduler.schedule()
            result = engine.runner.execute(step.descriptor).message()
            engine.scheduler.update(step, result)
            steps.append((step.descriptor, result))
    assert engine.scheduler.counts.tiers.hit_tokens >= 200
    settings = engine_settings(folder, engine.limits, num_blocks=engine.cache[0].num_blocks)
    opening = Snapshot(next_step_id=1, engine=settings)
    trace = write_recording(tmp_path / "trace.binpb", steps, snapshot=opening)
    for against in ("eager", "full"):
        totals, report = run(trace, folder, against)
        assert totals.is_clean, report
