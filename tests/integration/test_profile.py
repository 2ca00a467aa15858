"""Profiles of a running engine: one at a time, bounded, and only where the operator allows them."""

import asyncio
import gzip
import json

import grpc
import pytest

from protos.engine.v1.engine_pb2 import GetStatsRequest, StartProfileRequest, StopProfileRequest
from protos.engine.v1.worker_pb2 import ProfileEnd
from services.client.cli import main
from tests.support.engine_client import engine_stub, generate
from tests.support.held import worker_of
from tests.support.processes import start_engine

SMALL = {"max_model_len": 128, "max_num_seqs": 4, "num_kv_blocks": 64, "device": "cpu"}
PROMPT = [5, 6, 7, 8]


def events(path):
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details()


async def run_octavo(capsys, *arguments):
    """Returns the exit code and both outputs of a command."""
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(main, arguments)
    return ended.value.code, *capsys.readouterr()


async def test_a_trace_names_the_steps_between_start_and_stop(tmp_path):
    with start_engine(**SMALL, profile_dir=tmp_path / "new" / "traces") as engine:
        async with engine_stub(engine.address) as stub:
            expected = await generate(stub, PROMPT, max_tokens=8, temperature=0)
            started = await stub.StartProfile(StartProfileRequest())
            running = await refusal(stub.StartProfile(StartProfileRequest()))
            profiled = await generate(stub, PROMPT, max_tokens=8, temperature=0)
            ended = await stub.StopProfile(StopProfileRequest())
            assert profiled.token_ids == expected.token_ids
            code, details = running
            assert (code, details) == (
                grpc.StatusCode.FAILED_PRECONDITION,
                "a profile is running; stop it first",
            )
            assert (ended.path, ended.end) == (started.path, ProfileEnd.PROFILE_END_STOPPED)
            assert 8 <= ended.num_steps <= 9
            names = {event.get("name", "") for event in events(ended.path)}
            assert sum(name.startswith("step ") for name in names) == ended.num_steps
            assert "aten::_fused_rms_norm" in names
            code, _ = await refusal(stub.StopProfile(StopProfileRequest()))
            assert code == grpc.StatusCode.FAILED_PRECONDITION
            assert [path.suffix for path in (tmp_path / "new" / "traces").iterdir()] == [".gz"]


async def test_with_two_ranks_the_trace_is_that_of_the_one_that_reports(tmp_path):
    with start_engine(**SMALL, profile_dir=tmp_path, tensor_parallel_size=2) as engine:
        async with engine_stub(engine.address) as stub:
            await stub.StartProfile(StartProfileRequest(max_steps=3))
            await generate(stub, PROMPT, max_tokens=8, ignore_eos=True)
            ended = await stub.StopProfile(StopProfileRequest())
            assert (ended.end, ended.num_steps) == (ProfileEnd.PROFILE_END_STEPS, 3)
            steps = [
                each for each in events(ended.path) if each.get("name", "").startswith("step ")
            ]
            assert len(steps) == 3
            assert len({each["pid"] for each in steps}) == 1


@pytest.mark.parametrize(
    ("flags", "cases"),
    [
        (
            {},
            [
                ({"max_steps": 3}, ProfileEnd.PROFILE_END_STEPS),
                ({"duration_ms": 1}, ProfileEnd.PROFILE_END_TIME),
            ],
        ),
        ({"profile_max_mb": 1}, [({}, ProfileEnd.PROFILE_END_MEMORY)] * 2),
    ],
)
async def test_a_limit_ends_a_profile_and_the_next_can_start(tmp_path, flags, cases):
    with start_engine(**SMALL, profile_dir=tmp_path, **flags) as engine:
        async with engine_stub(engine.address) as stub:
            for limits, end in cases:
                await stub.StartProfile(StartProfileRequest(**limits))
                async with asyncio.timeout(60):
                    while not list(tmp_path.glob("*.gz")):
                        await generate(stub, PROMPT, max_tokens=100, ignore_eos=True)
                ended = await stub.StopProfile(StopProfileRequest())
                assert ended.end == end
                assert ended.num_steps == 3 or end != ProfileEnd.PROFILE_END_STEPS
                for path in tmp_path.iterdir():
                    events(path)
                    path.unlink()


async def test_profiles_are_refused_where_they_are_not_allowed_or_out_of_bounds(tmp_path):
    with start_engine(**SMALL) as engine:
        async with engine_stub(engine.address) as stub:
            code, details = await refusal(stub.StartProfile(StartProfileRequest()))
            assert code == grpc.StatusCode.PERMISSION_DENIED
            assert "--profile-dir" in details
    (tmp_path / "file").touch()
    with start_engine(**SMALL, profile_dir=tmp_path / "file", profile_max_s=5) as engine:
        async with engine_stub(engine.address) as stub:
            too_long = stub.StartProfile(StartProfileRequest(duration_ms=5001))
            assert (await refusal(too_long))[0] == grpc.StatusCode.INVALID_ARGUMENT
            no_step = stub.StartProfile(StartProfileRequest(max_steps=0))
            assert (await refusal(no_step))[0] == grpc.StatusCode.INVALID_ARGUMENT
            unusable = await refusal(stub.StartProfile(StartProfileRequest()))
            assert unusable[0] == grpc.StatusCode.FAILED_PRECONDITION
            assert "the folder of traces cannot be used" in unusable[1]


async def test_a_lost_worker_takes_its_profile_along(tmp_path):
    with start_engine(**SMALL, profile_dir=tmp_path) as engine:
        async with engine_stub(engine.address) as stub:
            await stub.StartProfile(StartProfileRequest())
            worker_of(engine).kill()
            stopped = await refusal(stub.StopProfile(StopProfileRequest()))
            assert stopped[0] == grpc.StatusCode.UNAVAILABLE
            async with asyncio.timeout(60):
                while True:
                    stats = await stub.GetStats(GetStatsRequest())
                    if stats.ready:
                        break
                    await asyncio.sleep(0.05)
            await stub.StartProfile(StartProfileRequest(max_steps=1))
            await generate(stub, PROMPT, max_tokens=2)
            assert (await stub.StopProfile(StopProfileRequest())).num_steps == 1


async def test_the_commands_start_and_stop_a_profile(tmp_path, monkeypatch, capsys):
    with start_engine(**SMALL, profile_dir=tmp_path) as engine:
        monkeypatch.setenv("OCTAVO_ENGINE", engine.address)
        code, _, problem = await run_octavo(capsys, "profile", "stop")
        assert (code, problem) == (1, "octavo: no profile is running\n")
        code, path, _ = await run_octavo(capsys, "profile", "start", "--steps", "50")
        assert code == 0
        code, report, _ = await run_octavo(capsys, "profile", "stop")
        assert code == 0
        assert report.startswith(f"{path.strip()}: 0 steps in ")
