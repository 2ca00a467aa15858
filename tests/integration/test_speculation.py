"""A speculating engine gives the output of one that does not, and reports how well it guesses."""

import asyncio
import json
import random
import shutil

import pytest

from services.engine.config.checkpoint import TINY_CHECKPOINT
from services.engine.replay.recording import Recording
from tests.support.draft_checkpoints import write_draft_checkpoint
from tests.support.engine_client import begin, engine_stub, generate, get_stats
from tests.support.forked_program import run_forked, run_octavo
from tests.support.pace import stopped, together, until_aborted, until_live
from tests.support.processes import start_engine
from tests.support.random_checkpoints import SHAPE, write_checkpoint
from tests.support.steered_engine import MODULE, WATCHED, stop_after
from tests.support.waiting import until

TOLERANCE = 1e-4
LIMITS = {
    "device": "cpu",
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "num_kv_blocks": 40,
    "block_size": 8,
}
SAMPLINGS = [
    {},
    {"max_tokens": 1},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"logit_bias": {7: 3.0, 11: -100.0}},
    {"min_tokens": 9, "stop_token_ids": list(range(0, 97, 4))},
    {"stop_token_ids": list(range(0, 97, 9)), "temperature": 1.0},
    {"logprobs": 3},
    {"logprobs": 2, "temperature": 1.0, "repetition_penalty": 1.2},
    {"max_tokens": 90},
]
"""Options of the requests; max_tokens 90 leads to the end of the context."""


def add_tokenizer(folder):
    """Engines do not start without one; these tests never use it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHECKPOINT / name, folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafting")
    write_draft_checkpoint(folder, agreement=0.98)
    return add_tokenizer(folder)


def requests():
    """Prompts, some of them with a common beginning, and what each asks for."""
    chance = random.Random(5)
    common = [chance.randrange(SHAPE["vocab_size"]) for _ in range(20)]
    made = []
    for index in range(33):
        own = [chance.randrange(SHAPE["vocab_size"]) for _ in range(chance.randint(1, 45))]
        sampling = {"max_tokens": 30, "seed": index, **SAMPLINGS[index % len(SAMPLINGS)]}
        made.append((common + own if index % 3 == 0 else own, sampling))
    return made


async def outputs(stub):
    replies = await asyncio.gather(*(generate(stub, p, **sampling) for p, sampling in requests()))
    return [(r.token_ids, r.finish_reason, r.stop_token_id) for r in replies], [
        [
            (top.token_id, top.logprob)
            for position in reply.logprobs
            for top in (position.chosen, *position.top)
        ]
        for reply in replies
    ]


async def serve(folder, **flags):
    """Returns what an engine makes of all requests at once, and its figures afterwards."""
    async with start_engine(model=folder, **flags) as engine, engine_stub(engine.address) as stub:
        async with together(engine, len(requests())):
            found = asyncio.create_task(outputs(stub))
        return await found, await get_stats(stub)


@pytest.fixture(scope="module")
def expected(folder):
    found, stats = asyncio.run(serve(folder, **LIMITS))
    assert (stats.num_speculative_tokens, stats.draft_tokens, stats.num_verifications) == (0, 0, 0)
    return found


@pytest.mark.parametrize(
    ("num_speculative_tokens", "flags"),
    [
        (1, {"enable_prefix_caching": False, "min_speculative_tokens": 1}),
        (2, {"cudagraph_mode": "full_decode_only", "capture_while_serving": False}),
        (3, {"num_kv_blocks": 20, "min_speculative_tokens": 3}),
    ],
)
async def test_output_is_that_of_an_engine_that_does_not_speculate(
    folder, expected, num_speculative_tokens, flags
):
    flags = {**LIMITS, **flags, "num_speculative_tokens": num_speculative_tokens}
    (tokens, logprobs), stats = await serve(folder, **flags)
    assert tokens == expected[0]
    assert len(logprobs) == len(expected[1])
    for found, wanted in zip(logprobs, expected[1], strict=True):
        assert [token_id for token_id, _ in found] == [token_id for token_id, _ in wanted]
        assert [value for _, value in found] == pytest.approx(
            [value for _, value in wanted], abs=TOLERANCE
        )
    assert stats.num_speculative_tokens == num_speculative_tokens
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens
    assert stats.draft_tokens <= stats.num_verifications * num_speculative_tokens
    if "num_kv_blocks" in flags and flags["num_kv_blocks"] < LIMITS["num_kv_blocks"]:
        assert stats.num_preemptions > 0
    if "cudagraph_mode" in flags:
        assert {graph.max_q_len for graph in stats.graphs} == {1, 2, 3}
        assert sum(stats.steps_by_num_drafts.values()) == stats.num_steps
        assert stats.graph_dispatch["graph"] > 10


async def test_a_request_that_goes_away_costs_the_others_nothing(folder, expected, stop_file):
    flags = {**LIMITS, "num_speculative_tokens": 2}
    flags |= {"model": folder, "module": MODULE, "stop_file": stop_file}
    async with start_engine(**flags) as engine, engine_stub(engine.address) as stub:
        asked = {"max_tokens": 80, "ignore_eos": True}
        stop_after(stop_file, 9)
        async with together(engine, 4):
            lost = [begin(stub, [5, 6, index], **asked) for index in range(4)]
        async with stopped(engine):
            for call in lost:
                await anext(aiter(call))
            others = asyncio.create_task(outputs(stub))
            for call in lost:
                call.cancel()
            await until_aborted(engine, len(lost))
        tokens, _ = await others
        stats = await get_stats(stub)
    assert tokens == expected[0]
    assert stats.num_running == 0
    assert stats.finished["aborted"] == len(lost)
    assert stats.num_free_blocks == stats.num_blocks - 1


def test_the_command_reports_how_many_drafts_are_accepted(folder):
    with start_engine(
        model=folder, **LIMITS, num_speculative_tokens=2, min_speculative_tokens=2
    ) as engine:

        async def some():
            async with engine_stub(engine.address) as stub:
                await generate(stub, [5, 17, 3], max_tokens=20, ignore_eos=True)

        asyncio.run(some())
        shown = run_octavo("stats", "--engine", engine.address, "--once")
        figures = run_octavo("stats", "--engine", engine.address, "--json")
    assert "with at most 2 drafts" in " ".join(shown.stdout.replace("│", " ").split())
    counts = json.loads(figures.stdout)
    assert 0 < counts["accepted_draft_tokens"] <= counts["draft_tokens"]


async def test_a_recording_from_the_middle_of_outputs_can_be_replayed(folder, tmp_path, stop_file):
    path = tmp_path / "trace.binpb"
    flags = {**LIMITS, "model": folder, "allow_watch_tokens": True, "num_speculative_tokens": 2}
    flags |= {"cudagraph_mode": "full_decode_only", "cudagraph_capture_sizes": "[1,4]"}
    flags |= {"module": MODULE, "stop_file": stop_file}
    async with start_engine(**flags) as engine, engine_stub(engine.address) as stub:

        def start(prompt, num_output):
            call = generate(stub, prompt, max_tokens=num_output, ignore_eos=True)
            return asyncio.create_task(call)

        stop_after(stop_file, 10)
        async with together(engine, 3):
            outputs = [start([5, 17, 3] * 8 + [7], 61), start([70] * 9, 53)]
            outputs.append(start([5, 17, 3] * 8, 40))
        async with stopped(engine):
            wanted = ("--out", path, "--steps", 30, "--engine", engine.address)
            recorder = asyncio.create_task(asyncio.to_thread(run_octavo, "record", *wanted))
            await until(lambda: WATCHED in engine.log, timeout_s=60)
            # Finds a prefix that was computed before the recording began.
            outputs.append(start([5, 17, 3] * 8, 20))
            await until_live(engine, 4)
        await asyncio.gather(*outputs)
        await start([70] * 9, 53)
        recorded = await recorder
        assert recorded.returncode == 0, recorded.stderr
    assert any(row.num_computed_tokens > 9 for row in Recording.open(path).snapshot.rows)
    flags = ("--device", "cpu", "--model", folder, "--against", "full")
    command = ("services.engine", "replay", path, *flags)
    replayed = await asyncio.to_thread(run_forked, *map(str, command))
    output = replayed.stdout + replayed.stderr
    assert replayed.returncode == 0, output
    assert ", 0 different" in output
    assert "tokens from before the recording were computed again" in output


@pytest.mark.parametrize(
    ("variant", "flags", "reason"),
    [
        ("llama", {}, "the model is LlamaForCausalLM"),
        (None, {"block_size": 2}, "must be less than block_size, which is 2"),
        (None, {"max_num_batched_tokens": 2}, "less than max_num_batched_tokens, which is 2"),
        (None, {"capture_sizes": "auto"}, "must be 0 with cudagraph_capture_sizes auto"),
    ],
)
def test_what_it_cannot_work_with_is_refused_at_the_start(tmp_path, folder, variant, flags, reason):
    if variant is not None:
        write_checkpoint(tmp_path, variant)
        folder = add_tokenizer(tmp_path)
    flags = {"model": folder, "device": "cpu", **flags, "num_speculative_tokens": 2}
    process = start_engine(**flags)
    process.start()
    try:
        assert process.wait(60) == 2
        assert reason in process.log
    finally:
        process.kill()
