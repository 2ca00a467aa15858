"""SIGKILL, SIGSTOP and SIGTERM of the engine and of the frontend, while clients are served."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.common.v1.sampling_pb2 import FinishReason, SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.engine_client import begin, engine_stub, generate
from tests.support.held import assert_all_is_given_back, held_by, worker_of
from tests.support.pace import frozen, stopped, together, until_live
from tests.support.processes import ServiceProcess, Stack, stack, start_engine, start_frontend
from tests.support.steered_engine import MODULE, stop_after
from tests.support.waiting import until

LENGTH = FinishReason.FINISH_REASON_LENGTH
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SILENCE_LIMIT_S = 6.0
"""Longer than a busy machine holds a process up that is not stopped."""
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def services(stop_file) -> Iterator[Stack]:
    with stack(engine={"module": MODULE, "stop_file": stop_file}) as running:
        yield running


@contextlib.asynccontextmanager
async def client_of(frontend: ServiceProcess) -> AsyncIterator[FrontendServiceStub]:
    async with grpc.aio.insecure_channel(frontend.address) as channel:
        yield FrontendServiceStub(channel)


def request(max_tokens: int) -> pb.GenerateRequest:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text="x", options=pb.GenerationOptions(sampling=sampling))


async def last_of(answers) -> pb.Output:
    return [response.output async for response in answers][-1]


async def assert_unavailable(answers, *, reason: str | None = None) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=reason) as caught:
        await last_of(answers)
    assert caught.value.code() == UNAVAILABLE


class TestEngine:
    async def test_sigstop_is_noticed_in_time_and_its_return_too(self, stop_file):
        """Only by a frontend whose limit it reaches: another one's answer goes on."""
        async with (
            stack(
                engine={"module": MODULE, "stop_file": stop_file},
                frontend={"engine_silence_timeout_s": SILENCE_LIMIT_S},
            ) as services,
            client_of(services.frontend) as stub,
            start_frontend(services.engine.address) as other,
            client_of(other) as other_stub,
        ):
            baseline = await held_by(services.engine)
            stop_after(stop_file, 20)
            async with together(services.engine, 2):
                calls = [each.Generate(request(500)) for each in (stub, other_stub)]
            answers, others = map(aiter, calls)
            async with stopped(services.engine):
                await asyncio.gather(anext(answers), anext(others))
                services.engine.signal(signal.SIGSTOP)
                await asyncio.gather(
                    assert_unavailable(answers, reason=f"it was silent for {SILENCE_LIMIT_S} s"),
                    asyncio.sleep(6),  # longer than pings come apart and gRPC waits for theirs
                )
                await assert_unavailable(stub.Generate(request(5)))
                assert not await asyncio.to_thread(services.frontend.is_serving)
                assert await asyncio.to_thread(services.frontend.is_serving, "liveness")
                services.engine.signal(signal.SIGCONT)
            assert (await last_of(others)).finish_reason == LENGTH
            await asyncio.to_thread(services.frontend.wait_ready)
            assert (await last_of(stub.Generate(request(5)))).finish_reason == LENGTH
            await assert_all_is_given_back(services.engine, baseline)

    async def test_sigkill_ends_answers_and_it_is_found_again_on_its_port(self, stop_file):
        async with (
            stack(engine={"module": MODULE, "stop_file": stop_file}) as services,
            client_of(services.frontend) as stub,
        ):
            baseline = await held_by(services.engine)
            stop_after(stop_file, 5)
            answers = aiter(stub.Generate(request(2000)))
            await anext(answers)
            async with stopped(services.engine):
                services.engine.kill()
            await assert_unavailable(answers)
            services.engine.start()
            await asyncio.to_thread(services.engine.wait_ready)
            await asyncio.to_thread(services.frontend.wait_ready)
            assert (await last_of(stub.Generate(request(5)))).finish_reason == LENGTH
            await assert_all_is_given_back(services.engine, baseline)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    async def test_sigterm_lets_the_running_request_finish_and_exits_0(self, number):
        async with (
            start_engine(drain_timeout_s=120) as engine,
            engine_stub(engine.address) as stub,
            grpc.aio.insecure_channel(engine.address) as channel,
        ):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == SERVING
            running = asyncio.create_task(generate(stub, PROMPT, max_tokens=600, ignore_eos=True))
            with frozen(worker_of(engine)):
                await until_live(engine, 1)
                engine.signal(number)
                assert (await watch.read()).status == NOT_SERVING
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await generate(stub, PROMPT, max_tokens=5)
                assert caught.value.code() == UNAVAILABLE
            assert (await running).finish_reason == LENGTH
            assert await asyncio.to_thread(engine.wait) == 0

    async def test_a_second_signal_ends_it_at_once(self):
        async with start_engine() as engine, engine_stub(engine.address) as stub:
            worker = worker_of(engine)
            worker.suspend()
            running = begin(stub, PROMPT, max_tokens=2000, ignore_eos=True)
            await running.initial_metadata()  # the engine has it
            engine.signal(signal.SIGTERM)
            await until(lambda: "drain_began" in engine.log)
            engine.signal(signal.SIGTERM)
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.resume()  # the engine would wait seconds for one that cannot end itself
            assert await asyncio.to_thread(engine.wait) == 1


class TestFrontend:
    async def test_sigkill_frees_what_its_requests_held(self, services, stop_file):
        baseline = await held_by(services.engine)
        async with (
            start_frontend(services.engine.address) as frontend,
            client_of(frontend) as stub,
        ):
            stop_after(stop_file, 20)
            with frozen(worker_of(services.engine)):
                calls = [aiter(stub.Generate(request(1500))) for _ in range(8)]
                await until_live(services.engine, 8)
            async with stopped(services.engine):
                for call in calls:
                    await anext(call)
                frontend.kill()
                await asyncio.gather(*map(assert_unavailable, calls))
        await assert_all_is_given_back(services.engine, baseline)

    async def test_sigstop_costs_its_own_requests_and_no_others(self):
        async with (
            start_engine(slow_reader_timeout_s=6, credit_window=4) as engine,
            start_frontend(engine.address) as frontend,
            client_of(frontend) as stub,
            engine_stub(engine.address) as direct,
        ):
            baseline = await held_by(engine)
            expected = await generate(direct, PROMPT, max_tokens=600, ignore_eos=True)
            with frozen(worker_of(engine)):
                calls = [aiter(stub.Generate(request(2000))) for _ in range(4)]
                await until_live(engine, 4)
                frontend.signal(signal.SIGSTOP)
            assert await generate(direct, PROMPT, max_tokens=600, ignore_eos=True) == expected
            await until(lambda: "session_closed" in engine.log, timeout_s=60)
            frontend.signal(signal.SIGCONT)
            endings = await asyncio.gather(*map(last_of, calls), return_exceptions=True)
            for ending in endings:
                if isinstance(ending, grpc.aio.AioRpcError):
                    # It lost its engine, or believes that the client took nothing all the while.
                    assert ending.code() in (UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
                else:
                    assert ending.finish_reason == LENGTH
            await until(lambda: "engine_lost" in frontend.log)
            await asyncio.to_thread(frontend.wait_ready)
            assert (await last_of(stub.Generate(request(5)))).finish_reason == LENGTH
            await assert_all_is_given_back(engine, baseline)

    async def test_sigterm_lets_answers_finish_and_exits_0(self, services):
        async with (
            start_frontend(services.engine.address, drain_timeout_s=120) as frontend,
            client_of(frontend) as stub,
        ):
            answers = aiter(stub.Generate(request(300)))
            await anext(answers)
            frontend.signal(signal.SIGTERM)
            assert (await last_of(answers)).finish_reason == LENGTH
            assert await asyncio.to_thread(frontend.wait) == 0

    async def test_a_second_signal_ends_it_at_once_whichever_it_is(self, services):
        async with (
            start_frontend(services.engine.address) as frontend,
            client_of(frontend) as stub,
        ):
            with frozen(worker_of(services.engine)):
                answers = aiter(stub.Generate(request(2000)))
                await until_live(services.engine, 1)
                frontend.signal(signal.SIGTERM)
                await until(lambda: "signal_received" in frontend.log)
                frontend.signal(signal.SIGINT)
                assert await asyncio.to_thread(frontend.wait) == -signal.SIGINT
                await assert_unavailable(answers)
