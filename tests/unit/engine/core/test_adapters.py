"""Adapters that leave and come back while requests of them run."""

import asyncio

import pytest

from protos.engine.v1.worker_pb2 import AdapterRead
from services.engine.config.lora import LoraConfig
from services.engine.core import adapters as adapters_module
from services.engine.core.adapters import Adapters
from services.engine.errors import (
    EngineUnavailableError,
    InvalidRequestError,
)
from tests.support.requests import make_request
from tests.support.waiting import until


class Orders:
    """A worker that reads what `digests` says, each once `may_answer` allows it."""

    def __init__(self, digests):
        self.digests = digests
        self.held = set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @property
    def adapters(self):
        return self

    async def read(self, path):
        digest = self.digests.get(path)
        if digest is None:
            return AdapterRead(error="it is missing")
        self.held.add(digest)
        await self.may_answer.wait()
        return AdapterRead(digest=digest, rank=8, num_bytes=1)

    def forget(self, digest):
        self.held.discard(digest)


@pytest.fixture
def live():
    return []


@pytest.fixture
def ended():
    return {}


@pytest.fixture
def adapters(tmp_path, live, ended, monkeypatch):
    monkeypatch.setattr(adapters_module, "UNUSED_POLL_S", 0.001)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    config = LoraConfig(lora_folder=tmp_path, max_loras=1)

    def end(request, error):
        live.remove(request)
        ended[request.request_id] = error

    return Adapters(config, model="m", live=lambda: list(live), end=end)


@pytest.fixture
def digests(tmp_path):
    return {str(tmp_path / name): name.encode() * 32 for name in ("a", "b")}


async def test_an_adapter_that_is_read_again_is_not_forgotten(adapters, live, digests):
    worker = Orders(digests)
    await adapters.use_worker(worker)
    live.append(make_request(4, adapter=await adapters.load("a", "a")))
    adapters.remove("a")
    worker.may_answer.clear()
    loading = asyncio.create_task(adapters.load("again", "a"))
    await until(lambda: adapters._loading)
    live.clear()
    for _ in range(20):
        await asyncio.sleep(0.001)
    worker.may_answer.set()
    await loading
    await until(lambda: not adapters._forgetting)
    assert worker.held == {b"a" * 32}
    adapters.remove("again")
    await until(lambda: not worker.held)


async def test_an_adapter_is_forgotten_while_others_are_always_being_read(adapters, digests):
    class Slow(Orders):
        async def read(self, path):
            await asyncio.sleep(0.01)
            return await super().read(path)

    worker = Slow(digests)
    await adapters.use_worker(worker)
    await adapters.load("a", "a")

    async def churn(name):
        while True:
            await adapters.load(name, "b")
            adapters.remove(name)

    others = [asyncio.create_task(churn(f"b{number}")) for number in range(6)]
    for number, task in enumerate(others):
        await asyncio.sleep(0.002 * number)
        assert not task.done()
    adapters.remove("a")
    await until(lambda: b"a" * 32 not in worker.held)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await until(lambda: not worker.held)


async def test_the_next_worker_has_the_removed_adapters_of_running_requests(
    adapters, live, ended, digests
):
    await adapters.use_worker(Orders(digests))
    requests = [make_request(4, adapter=await adapters.load(name, name)) for name in ("a", "b")]
    live += requests
    for name in ("a", "b"):
        adapters.remove(name)
    adapters.lose_worker()
    del digests[next(path for path in digests if path.endswith("b"))]
    worker = Orders(digests)
    assert adapters.must_read
    await adapters.use_worker(worker)
    assert worker.held == {b"a" * 32}
    assert live == requests[:1]
    assert isinstance(ended[requests[1].request_id], EngineUnavailableError)
    live.clear()
    await until(lambda: not adapters._forgetting)
    assert not worker.held
    assert not adapters.must_read


async def test_an_adapter_whose_caller_goes_while_it_is_read_is_forgotten(adapters, digests):
    worker = Orders(digests)
    await adapters.use_worker(worker)
    worker.may_answer.clear()
    loading = asyncio.create_task(adapters.load("a", "a"))
    await until(lambda: worker.held)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert adapters._loading == {"a"}
    worker.may_answer.set()
    await until(lambda: not worker.held and not adapters._forgetting)
    assert not adapters.all
    await adapters.load("a", "a")
    assert worker.held == {b"a" * 32}


async def test_an_adapter_that_cannot_be_read_once_its_caller_has_gone_leaves_its_name(adapters):
    worker = Orders({})
    await adapters.use_worker(worker)
    loading = asyncio.create_task(adapters.load("a", "a"))
    await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert adapters._loading
    await until(lambda: not adapters._forgetting)
    assert not adapters._loading


async def test_a_path_that_no_file_system_has_is_refused(adapters, digests):
    await adapters.use_worker(Orders(digests))
    with pytest.raises(InvalidRequestError, match="the folder cannot be read: File name too long"):
        await adapters.load("a", "a" * 300)


async def test_an_adapter_that_is_removed_asleep_does_not_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters_module, "UNUSED_POLL_S", 0.001)
    names = ("a", "b", "c")
    for name in names:
        (tmp_path / name).mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (tmp_path / name / file).write_text(name)
    start = [f"{name}={tmp_path / name}" for name in names]
    config = LoraConfig(lora_folder=tmp_path, max_loras=1, lora=start)
    adapters = Adapters(config, model="m", live=list, end=lambda request, error: None)
    await adapters.announce()
    assert [each.name for each in adapters.all] == ["a", "b", "c"]
    adapters.remove("a")
    worker = Orders({str(tmp_path / name): name.encode() * 32 for name in names})
    worker.may_answer.clear()
    reading = asyncio.create_task(adapters.use_worker(worker))
    await until(lambda: worker.held)
    adapters.remove("b")
    worker.may_answer.set()
    await reading
    assert [each.name for each in adapters.all] == ["c"]
    await until(lambda: not adapters._forgetting)
    assert worker.held == {b"c" * 32}
