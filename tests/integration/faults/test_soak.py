"""Clients that behave badly and processes that die, for a while: nothing hangs, nothing leaks.

OCTAVO_SOAK_S says how long; `scripts/test --faults` takes ten minutes.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import psutil
import pytest

from protos.common.v1 import sampling_pb2
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.transport.status import RETRY_PUSHBACK
from tests.support.engine_client import engine_stub, get_stats
from tests.support.held import SETTLE_S, assert_all_is_given_back, children, held_by
from tests.support.memory_slope import MemorySlopes
from tests.support.processes import Stack, stack
from tests.support.varied_prompts import varied_prompts

SOAK_S = float(os.environ.get("OCTAVO_SOAK_S", "1"))
WARM_UP_S = min(5.0, SOAK_S / 2)
MAX_PAUSE_S = min(6.0, SOAK_S)
"""Longest time from the services' recovery to the next fault."""
STREAM_TIMEOUT_S = 240.0
"""No stream takes nearly this long, however slow the machine; one that does hangs."""
MAX_RUNNING = 32
NUM_CLIENTS = MAX_RUNNING * 3 // 2
"""Half as many again as can run: the others wait, or are refused and come back."""
PROMPTS = varied_prompts(64, seed=7)
ALLOWED_CODES = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
}
FATES = ["finish", "finish", "finish", "cancel", "deadline", "disconnect", "slow"]


@dataclass
class Tally:
    """Outcomes of the streams."""

    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    good_tokens: int = 0
    """Of requests that ran to their end."""


def _request(rng: random.Random) -> frontend_pb2.GenerateRequest:
    text, _ = rng.choice(PROMPTS)
    sampling = sampling_pb2.SamplingParams(
        temperature=rng.choice([0, 0.8, 1.5]),
        max_tokens=rng.choice([1, 8, 64, 200]),
        ignore_eos=True,
    )
    options = frontend_pb2.GenerationOptions(sampling=sampling, priority=rng.choice([0, 0, 1]))
    return frontend_pb2.GenerateRequest(options=options, text=text)


async def _consume(call, rng: random.Random, fate: str, tally: Tally, max_tokens: int) -> str:
    """Reads a stream until its fate, and returns how it ended."""
    stop_after = rng.randint(0, 20)
    last, num_tokens = None, 0
    try:
        async for response in call:
            last = response.output
            num_tokens += len(last.token_ids)
            stop_after -= 1
            if fate == "cancel" and stop_after < 0:
                call.cancel()
            if fate == "slow" and stop_after > 0:
                await asyncio.sleep(rng.uniform(0, 0.3))
    except asyncio.CancelledError:
        return "CANCELLED"
    except grpc.aio.AioRpcError as error:
        if error.code() not in ALLOWED_CODES:
            raise
        return await _pause_after(error)
    assert last is not None
    # Nothing was lost and nothing came twice, whatever died meanwhile.
    assert last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert num_tokens == max_tokens == last.usage.output_tokens
    tally.good_tokens += num_tokens
    return "LENGTH"


async def _pause_after(error: grpc.aio.AioRpcError) -> str:
    """Waits as a client should after a refusal with a time to retry."""
    pushback_ms = int(dict(error.trailing_metadata() or ()).get(RETRY_PUSHBACK, 0))
    is_away = error.code() == grpc.StatusCode.UNAVAILABLE
    await asyncio.sleep(max(pushback_ms / 1000, 0.3 if is_away else 0))
    return error.code().name


async def _client(address: str, seed: int, is_over: Callable[[], bool], tally: Tally) -> None:
    """One client: a request after the other, each with a fate; now and then the line is cut."""
    rng = random.Random(seed)
    while not is_over():
        async with grpc.aio.insecure_channel(
            address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stub = frontend_pb2_grpc.FrontendServiceStub(channel)
            for _ in range(rng.randint(1, 6)):
                fate = rng.choice(FATES)
                request = _request(rng)
                timeout = rng.uniform(0.01, 1.0) if fate == "deadline" else None
                call = stub.Generate(request, timeout=timeout)
                max_tokens = request.options.sampling.max_tokens
                reading = asyncio.create_task(_consume(call, rng, fate, tally, max_tokens))
                if fate == "disconnect":
                    await asyncio.sleep(rng.uniform(0, 0.5))
                    await channel.close()
                tally.ends[await asyncio.wait_for(reading, STREAM_TIMEOUT_S)] += 1
                if fate == "disconnect" or is_over():
                    break


def _worker_pid(services: Stack) -> int | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        others = children(services.engine)
        return others[0].pid if others else None
    return None


async def _break_things(services: Stack, seed: int, tally: Tally) -> None:
    """One fault after the other, each some seconds after the services have got over the last."""
    rng, last_fault = random.Random(seed), ""
    while True:
        await asyncio.sleep(rng.uniform(MAX_PAUSE_S / 3, MAX_PAUSE_S))
        # Two freezes in a row could hit a suspect twice, which then would rightly be to blame.
        choices = ["kill worker", "kill worker", "restart engine"]
        fault = rng.choice(choices + ["freeze worker"] * (last_fault != "freeze worker"))
        last_fault = fault
        if fault == "freeze worker":
            await _until_no_request_is_suspect(services)
        pid = _worker_pid(services)
        if fault == "restart engine":
            services.engine.kill()
            services.engine.start()
        elif pid is None:
            continue
        else:
            with contextlib.suppress(ProcessLookupError):  # the engine may be ending it
                os.kill(pid, signal.SIGSTOP if fault == "freeze worker" else signal.SIGKILL)
        tally.faults[fault] += 1
        # The engine has to notice first.
        while fault == "freeze worker" and _worker_pid(services) == pid:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        await asyncio.to_thread(services.frontend.wait_ready)


async def _until_no_request_is_suspect(services: Stack) -> None:
    """Waits until several requests run at once, which suspects never do."""
    await asyncio.to_thread(services.engine.wait_ready)
    async with engine_stub(services.engine.address) as stub:
        while (await get_stats(stub)).num_running < 2:  # noqa: ASYNC110  nothing to wait for
            await asyncio.sleep(0.05)


async def _sample_memory(services: Stack, slopes: MemorySlopes) -> None:
    while True:
        pids = {"frontend": services.frontend.pid, "engine": services.engine.pid}
        if (worker := _worker_pid(services)) is not None:
            pids["worker"] = worker
        slopes.sample(pids)
        await asyncio.sleep(0.5)


async def _soak(
    services: Stack, *, seed: int, duration_s: float, has_all: Callable[[], object] = lambda: True
) -> Tally:
    """Runs all clients for a while and until `has_all`, to the end of their last requests."""
    tally = Tally()
    end_s = time.monotonic() + duration_s

    def is_over() -> bool:
        return time.monotonic() >= end_s and bool(has_all())

    address = services.frontend.address
    await asyncio.gather(*(_client(address, seed + i, is_over, tally) for i in range(NUM_CLIENTS)))
    return tally


@pytest.mark.slow
@pytest.mark.timeout(2 * SOAK_S + 900)
async def test_every_stream_ends_and_everything_is_given_back():
    engine = {
        "num_kv_blocks": 300,
        "max_num_seqs": MAX_RUNNING,
        "max_num_waiting": MAX_RUNNING // 4,
        "step_timeout_s": 6,  # longer than a busy machine holds a worker up
        "worker_patience_s": STREAM_TIMEOUT_S / 2,
    }
    slopes = MemorySlopes()
    async with stack(engine=engine) as services:
        # Thread pools and the like grow to the load once and stay; what counts comes after.
        await _soak(services, seed=1000, duration_s=WARM_UP_S)
        baseline = await held_by(services.engine)
        num_fds = psutil.Process(services.frontend.pid).num_fds()
        tally = Tally()
        tasks = [
            asyncio.create_task(_break_things(services, 1, tally)),
            asyncio.create_task(_sample_memory(services, slopes)),
        ]
        started_s = time.monotonic()
        try:
            soaked = await _soak(
                services, seed=0, duration_s=SOAK_S, has_all=lambda: tally.faults or tasks[0].done()
            )
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        elapsed_s = time.monotonic() - started_s
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        await asyncio.to_thread(services.engine.wait_ready)
        await asyncio.to_thread(services.frontend.wait_ready)
        await assert_all_is_given_back(services.engine, baseline)
        num_fds_after = await _settled_fds(services.frontend.pid, num_fds)

    _report(
        elapsed_s=round(elapsed_s, 1),
        ends=dict(soaked.ends),
        faults=dict(tally.faults),
        good_tokens_per_s=round(soaked.good_tokens / elapsed_s, 1),
        rss_mb_per_minute=slopes.mb_per_minute(after_s=min(60.0, SOAK_S / 4)),
        frontend_fds=(num_fds, num_fds_after),
    )
    assert num_fds_after <= num_fds
    assert tally.faults
    assert {"LENGTH", "CANCELLED", "DEADLINE_EXCEEDED"} <= set(soaked.ends)


async def _settled_fds(pid: int, wanted: int) -> int:
    """Returns how many descriptors a process has once they are no more than wanted, or at last."""
    process, end_s = psutil.Process(pid), time.monotonic() + SETTLE_S
    while (num := process.num_fds()) > wanted and time.monotonic() < end_s:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return num


def _report(**facts: object) -> None:
    """Shows what pytest prints when the test fails, or always with -s."""
    for name, value in facts.items():
        print(f"{name}: {value}")  # noqa: T201  for readers of the test's output
