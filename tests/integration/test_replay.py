"""`octavo record` beside a busy engine, and `octavo replay` of what it wrote, as processes."""

import asyncio
import os
import random
import signal

import pytest

from services.engine.batch import pack_int32, read_int32
from services.engine.replay.recording import Recording
from tests.support.engine_client import engine_stub, generate, get_stats
from tests.support.forked_program import run_forked, start_octavo
from tests.support.pace import stopped, together
from tests.support.processes import start_engine
from tests.support.recordings import edit_recording
from tests.support.steered_engine import MODULE, WATCHED, stop_after
from tests.support.waiting import until

# Few blocks, so that requests are preempted and their rows and blocks change hands.
ENGINE = {
    "device": "cpu",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_kv_blocks": 24,
    "block_size": 8,
    "cudagraph_mode": "full_decode_only",
    "cudagraph_capture_sizes": "[2,4]",
    "allow_watch_tokens": True,
}
NUM_CHATS = 8
NUM_RECORDED_BYTES = 2**14
"""About half of all steps; the last ones may still be in the recorder's buffer."""
PREFIX = [5 + n for n in range(24)]


async def load(stub, seed):
    """Eight chats that begin alike, greedy and random ones, none of them short."""
    order = random.Random(seed)

    async def chat(number):
        own = [order.randrange(3, 400) for _ in range(order.randrange(1, 20))]
        sampling = {} if number % 3 else {"temperature": 1, "top_p": 0.9, "seed": number}
        prompt = (PREFIX if number % 2 else []) + own
        await generate(stub, prompt, max_tokens=30 + 4 * number, ignore_eos=True, **sampling)

    await asyncio.gather(*map(chat, range(NUM_CHATS)))


async def record(path, stop_file):
    """Records from the middle of one load until it is far into another."""
    partial, log = path.with_name(path.name + ".part"), path.with_suffix(".log")
    flags = {**ENGINE, "module": MODULE, "stop_file": stop_file}
    async with start_engine(**flags) as engine, engine_stub(engine.address) as stub:
        async with together(engine, NUM_CHATS):
            first = asyncio.create_task(load(stub, 0))
        await first
        stop_after(stop_file, 20)
        async with together(engine, NUM_CHATS):
            second = asyncio.create_task(load(stub, 1))
        async with stopped(engine):
            with log.open("wb") as output:
                command = ("record", "--out", path, "--engine", engine.address)
                recorder = start_octavo(*command, output=output.fileno())
            await until(lambda: WATCHED in engine.log, timeout_s=60)
        await second
        await load(stub, 3)
        await until(lambda: partial.stat().st_size > NUM_RECORDED_BYTES, timeout_s=60)
        os.kill(recorder.pid, signal.SIGINT)
        returncode = await asyncio.to_thread(recorder.wait, 60)
        assert returncode == 0, log.read_text()
        return log.read_text(), await get_stats(stub)


@pytest.fixture(scope="module")
def trace(tmp_path_factory, stop_file):
    path = tmp_path_factory.mktemp("trace") / "trace.binpb"
    output, stats = asyncio.run(record(path, stop_file))
    recording = Recording.open(path)
    assert f"{recording.num_steps} steps" in output
    assert recording.snapshot.rows
    assert recording.num_steps > 50
    assert stats.num_preemptions
    assert stats.cached_tokens
    return path


async def replay(path, *flags):
    command = ("services.engine", "replay", path, "--device", "cpu", *flags)
    ended = await asyncio.to_thread(run_forked, *map(str, command))
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--against", "eager"],
        ["--against", "full"],
        ["--against", "piecewise", "--compilation-level", "3", "--no-use-inductor"],
    ],
    ids=lambda flags: flags[1],
)
async def test_what_a_busy_engine_did_can_be_done_again(trace, tmp_path, flags):
    code, output = await replay(trace, *flags, "--compile-cache-dir", tmp_path)
    assert code == 0, output
    assert f"{Recording.open(trace).num_steps} steps against {flags[1]}" in output
    assert ", 0 different" in output


async def test_a_wrong_token_is_named_and_sets_the_exit_code(trace, tmp_path):
    def edit(step):
        tokens = read_int32(step.result.token_ids).tolist()
        if len(tokens) < 2:
            return False
        step.result.token_ids = pack_int32([tokens[0] ^ 1, *tokens[1:]])
        return True

    edited = edit_recording(trace, tmp_path / "edited.binpb", edit)
    code, output = await replay(tmp_path / "edited.binpb", "--against", "full")
    assert code == 1, output
    assert output.startswith(f"step {edited.descriptor.step_id} differs")
    assert f"recorded {read_int32(edited.result.token_ids)[0]}, eager" in output


async def test_a_file_that_is_no_recording_is_a_usage_error(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a recording")
    code, output = await replay(path, "--against", "eager")
    assert code == 2
    assert output == f"octavo replay: {path} is not a recording: `octavo record` makes one\n"
