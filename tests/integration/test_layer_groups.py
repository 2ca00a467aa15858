"""A model of gpt-oss's kind in the running engine: every other layer keeps a window of blocks."""

import asyncio
import shutil

import pytest
import torch

from models.loading.loader import load_model
from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.replay.recording import Recording
from tests.support.engine_client import begin, engine_stub, generate, get_stats
from tests.support.forked_program import run_forked, run_octavo
from tests.support.pace import stopped, together, until_live
from tests.support.paged_runner import PagedRunner
from tests.support.processes import start_engine
from tests.support.random_checkpoints import write_checkpoint
from tests.support.steered_engine import MODULE, WATCHED, stop_after
from tests.support.waiting import until

BLOCK_SIZE, WINDOW, MAX_QUERY = 4, 7, 16
NUM_OUTPUT = 120
PROMPT = [5, 17, 3, 44, 2, 9, 9, 31, 60, 7, 8, 1]
ENGINE = {
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": MAX_QUERY,
    "block_size": BLOCK_SIZE,
    "cudagraph_mode": "full_decode_only",
    "cudagraph_capture_sizes": "[1,4]",
}


CHANGES = {"llama4": {"no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": WINDOW}}


def write_folder(folder, variant):
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": 256}
    write_checkpoint(folder, variant, **sizes, **CHANGES.get(variant, {}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHECKPOINT / name, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("checkpoint"), "gpt_oss")


@pytest.fixture(
    params=[
        "gpt_oss",
        pytest.param("gemma4", marks=pytest.mark.families),
        pytest.param("llama4", marks=pytest.mark.families),
    ]
)
def any_folder(request, folder, tmp_path):
    """Layers of Gemma 4 with and without a window cache different sizes of a token.

    Those of Llama 4 have chunks for windows.
    """
    return folder if request.param == "gpt_oss" else write_folder(tmp_path / "any", request.param)


def greedy(folder, prompt, num_output):
    """Returns what the model says with a cache that keeps all blocks of all layers."""
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    runner = PagedRunner(model, num_blocks=128, block_size=BLOCK_SIZE)
    sequence = runner.add(list(prompt))
    for _ in range(num_output):
        logits = runner.run(sequence, MAX_QUERY)
        sequence.token_ids.append(int(logits[-1].argmax()))
    return sequence.token_ids[len(prompt) :]


async def test_a_long_output_holds_one_window_of_blocks_in_every_other_layer(any_folder):
    folder = any_folder
    num_kept = -(-(len(PROMPT) + NUM_OUTPUT) // BLOCK_SIZE)
    in_window = (WINDOW - 2 + MAX_QUERY) // BLOCK_SIZE + 2
    # So few blocks that the output would end early if windows gave none back.
    flags = {**ENGINE, "model": folder, "num_kv_blocks": 1 + num_kept + in_window}
    async with start_engine(**flags) as engine, engine_stub(engine.address) as stub:
        tokens, num_held = [], []
        async for response in begin(stub, PROMPT, max_tokens=NUM_OUTPUT, ignore_eos=True):
            tokens += response.token_ids
            stats = await get_stats(stub)
            num_held.append(stats.num_blocks - 1 - stats.num_free_blocks)
            at_most = -(-(len(PROMPT) + len(tokens) + 2 * MAX_QUERY) // BLOCK_SIZE) + in_window
            assert num_held[-1] <= max(at_most, num_kept + in_window)
        again = await generate(stub, PROMPT, max_tokens=NUM_OUTPUT, ignore_eos=True)
        stats = await get_stats(stub)
    assert tokens == again.token_ids == greedy(folder, PROMPT, NUM_OUTPUT)
    # Decoding, a window is three blocks at most, beside the blocks that the other layers keep.
    assert max(num_held) <= num_kept + 3
    assert stats.num_free_blocks == stats.num_blocks - 1
    assert stats.num_preemptions == 0


async def test_a_recording_from_the_middle_of_outputs_can_be_replayed(
    any_folder, tmp_path, stop_file
):
    folder = any_folder
    path = tmp_path / "trace.binpb"
    flags = {**ENGINE, "model": folder, "num_kv_blocks": 100, "allow_watch_tokens": True}
    flags |= {"module": MODULE, "stop_file": stop_file}
    async with start_engine(**flags) as engine, engine_stub(engine.address) as stub:

        def start(prompt, num_output):
            call = generate(stub, prompt, max_tokens=num_output, ignore_eos=True)
            return asyncio.create_task(call)

        stop_after(stop_file, 30)
        async with together(engine, 3):
            outputs = [start(PROMPT * 3 + [7], 83), start(PROMPT, 47)]
            outputs.append(start(PROMPT * 3, 60))
        async with stopped(engine):
            wanted = ("--out", path, "--steps", 45, "--engine", engine.address)
            recorder = asyncio.create_task(asyncio.to_thread(run_octavo, "record", *wanted))
            await until(lambda: WATCHED in engine.log, timeout_s=60)
            # Finds a prefix that was computed before the recording began.
            outputs.append(start(PROMPT * 3, 20))
            await until_live(engine, 4)
        await asyncio.gather(*outputs)
        recorded = await recorder
        assert recorded.returncode == 0, recorded.stderr
    assert any(row.num_computed_tokens > 2 * WINDOW for row in Recording.open(path).snapshot.rows)
    flags = ("--device", "cpu", "--model", folder, "--against", "full")
    command = ("services.engine", "replay", path, *flags)
    replayed = await asyncio.to_thread(run_forked, *map(str, command))
    output = replayed.stdout + replayed.stderr
    assert replayed.returncode == 0, output
    assert ", 0 different" in output
