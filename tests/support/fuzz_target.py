"""Both services under a fuzzer: started once, and compared afterwards with their state before."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import grpc
import httpx
import psutil
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos.engine.v1 import engine_pb2
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.frontend.v1 import frontend_pb2
from protos.openengine.v1 import openengine_pb2
from tests.support.fuzz_calls import FuzzedService
from tests.support.processes import Stack, free_port, stack

MAX_MEMORY_GROWTH_BYTES = 200 * 2**20
TROUBLES = ("internal_error", "Traceback", "never retrieved", "was_to_blame", "worker_was_lost")
ENGINE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"]
FRONTEND = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"]
OPENENGINE = tuple(openengine_pb2.DESCRIPTOR.services_by_name.values())
SHARED = (
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
_FLAGS = {"log_level": "warning"}
_ENGINE_FLAGS = {
    **_FLAGS,
    # Taken requests are answered soon, and more are asked for than fit.
    "max_model_len": 128,
    "max_num_seqs": 16,
    "max_num_waiting": 32,
    "num_kv_blocks": 64,
    "allow_watch_tokens": True,
    "kv_events": True,
    "openengine_grpc": True,
}


@dataclass(frozen=True)
class Target:
    """The services under a fuzzer, and their state before."""

    stack: Stack
    http_url: str
    services: tuple[FuzzedService, ...]
    """Every service of every process: the engine's, the frontend's, and what both have."""
    engine: EngineServiceStub
    before: engine_pb2.GetStatsResponse
    answer: str
    memory_bytes: int

    def service(self, descriptor: ServiceDescriptor) -> FuzzedService:
        """Returns the first service of a kind."""
        return next(each for each in self.services if each.descriptor is descriptor)

    def complaints(self) -> list[str]:
        """Returns log lines of both services that no caller should be able to cause."""
        logs = (self.stack.engine.log, self.stack.frontend.log)
        lines = [line for log in logs for line in log.splitlines()]
        return [line for line in lines if any(each in line for each in TROUBLES)]

    def check_is_unharmed(self) -> None:
        """Fails unless both services are as they were at the start."""
        assert self.stack.engine.is_running
        assert self.stack.frontend.is_running
        _wait_until(lambda: _held(self._stats()) == _held(self.before))
        assert self._stats().num_worker_restarts == 0
        assert ask(self.http_url) == self.answer
        assert memory_bytes(self.stack) - self.memory_bytes < MAX_MEMORY_GROWTH_BYTES

    def _stats(self) -> engine_pb2.GetStatsResponse:
        return self.engine.GetStats(engine_pb2.GetStatsRequest(), timeout=30)


@contextmanager
def fuzz_target() -> Iterator[Target]:
    """Starts both services."""
    port = free_port()
    with ExitStack() as exits:
        running = exits.enter_context(
            stack(engine=dict(_ENGINE_FLAGS), frontend={**_FLAGS, "http_port": port})
        )
        engine, frontend = (
            exits.enter_context(grpc.insecure_channel(each.address))
            for each in (running.engine, running.frontend)
        )
        url = f"http://127.0.0.1:{port}"
        answer = ask(url)
        stub = EngineServiceStub(engine)
        yield Target(
            stack=running,
            http_url=url,
            services=(
                *(FuzzedService(engine, each) for each in (ENGINE, *OPENENGINE, *SHARED)),
                *(FuzzedService(frontend, each) for each in (FRONTEND, *SHARED)),
            ),
            engine=stub,
            before=stub.GetStats(engine_pb2.GetStatsRequest(), timeout=30),
            answer=answer,
            memory_bytes=memory_bytes(running),
        )


def ask(url: str) -> str:
    """Returns the answer to a sane request."""
    question = {"role": "user", "content": "What is 3 + 4?"}
    body = {"model": "tiny", "messages": [question], "temperature": 0, "max_tokens": 16}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def memory_bytes(running: Stack) -> int:
    """Returns the resident memory of both services, without the worker."""
    pids = (running.engine.pid, running.frontend.pid)
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


def _held(stats: engine_pb2.GetStatsResponse) -> tuple[int, ...]:
    return stats.num_running, stats.num_waiting, stats.num_sessions, stats.num_free_blocks


def _wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the services hold on to something"
        time.sleep(0.05)
