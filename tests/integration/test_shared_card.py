"""Models that share a card through real services: turns under load, equal streams, lost engines."""

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1.engine_pb2 import GetStatsRequest
from protos.engine.v1.engine_pb2_grpc import EngineServiceStub
from protos.frontend.v1.frontend_pb2 import GenerateRequest, GenerationOptions, ListModelsRequest
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.client.health import LIVENESS
from tests.support.processes import (
    ROOT,
    ServiceProcess,
    free_port,
    start_engine,
    start_frontend,
)

TINY = ROOT / "models" / "checkpoints" / "tiny"
PROMPT = "The quick brown fox"
NUM_TOKENS = 150


@dataclass
class Shared:
    """A frontend with a model of each engine, by name."""

    engines: dict[str, ServiceProcess]
    frontend: ServiceProcess
    url: str

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)

    def complete(self, model: str, max_tokens: int = NUM_TOKENS) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
        return self.post("/v1/completions", **body, ignore_eos=True)

    def text(self, model: str) -> str:
        answer = self.complete(model)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def text_over_grpc(self, model: str) -> str:
        sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        options = GenerationOptions(model=model, sampling=sampling)
        with grpc.insecure_channel(self.frontend.address) as channel:
            call = FrontendServiceStub(channel).Generate(
                GenerateRequest(text=PROMPT, options=options)
            )
            return "".join(response.output.text for response in call)

    def vector(self) -> list[float]:
        answer = self.post("/v1/embeddings", model="vectors", input=PROMPT)
        assert answer.status_code == 200, answer.text
        vector: list[float] = answer.json()["data"][0]["embedding"]
        return vector

    def metric(self, name: str, **labels: str) -> float:
        page = httpx.get(f"{self.url}/metrics", timeout=60).text
        families = text_string_to_metric_families(page)
        return next(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"octavo_frontend_{name}" and sample.labels == labels
        )

    def awake(self) -> list[str]:
        """Returns the models whose engines have the memory of weights and cache."""
        return [name for name, engine in self.engines.items() if state_of(engine) == "awake"]


@dataclass
class Load:
    """Requests of all models at the same time, from threads."""

    shared: Shared
    expected: dict[str, str]
    failures: list[str] = field(default_factory=list)
    num_done: int = 0
    is_over: bool = False

    def run(self, model: str, index: int) -> None:
        while not self.is_over:
            try:
                ask = self.shared.text_over_grpc if index % 2 else self.shared.text
                if ask(model) != self.expected[model]:
                    self.failures.append(f"{model}: another text")
            except Exception as error:  # noqa: BLE001  the test reports it
                self.failures.append(f"{model}: {error!r}")
            self.num_done += 1


def state_of(engine: ServiceProcess) -> str:
    with grpc.insecure_channel(engine.address) as channel:
        state: str = EngineServiceStub(channel).GetStats(GetStatsRequest()).sleep_state
        return state


def until(condition) -> None:
    while not condition():
        time.sleep(0.01)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    other = tmp_path_factory.mktemp("models") / "other"
    with_other_weights(other)
    flags = {"enable_sleep": True, "start_asleep": True, "num_kv_blocks": 128}
    engines = {
        "tiny": start_engine(model=TINY, **flags),
        "other": start_engine(model=other, **flags),
        "vectors": start_engine(model=TINY, task="embed", served_model_name="vectors", **flags),
    }
    addresses = ",".join(each.address for each in engines.values())
    port = free_port()
    frontend = start_frontend(
        addresses, http_port=port, swap_level=1, swap_min_awake_s=0.1, swap_drain_s=0
    )
    processes = [*engines.values(), frontend]
    try:
        for each in processes:
            each.start()
        for engine in engines.values():
            engine.wait_ready(LIVENESS)
        frontend.wait_ready()
        yield Shared(engines, frontend, f"http://127.0.0.1:{port}")
    except BaseException as error:
        for each in processes:
            each.__exit__(type(error), error, None)
        raise
    for each in reversed(processes):
        each.__exit__(None, None, None)


def with_other_weights(folder: Path) -> None:
    """Copies the embedded model without what its last layer's MLP adds."""
    shutil.copytree(TINY, folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = max(name for name in tensors if name.endswith("mlp.down_proj.weight"))
    tensors[name] = 0 * tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


def test_all_models_are_listed_and_none_is_loaded_before_it_is_asked_for(shared: Shared) -> None:
    names = ["other", "tiny", "vectors"]
    listed = httpx.get(f"{shared.url}/v1/models", timeout=60).json()["data"]
    assert [card["id"] for card in listed] == names
    with grpc.insecure_channel(shared.frontend.address) as channel:
        models = FrontendServiceStub(channel).ListModels(ListModelsRequest()).models
    assert [(model.name, model.ready) for model in models] == [(name, True) for name in names]
    for name in names:
        assert shared.post("/tokenize", model=name, prompt=PROMPT).json()["count"] > 3
    assert shared.awake() == []
    for name in ("", "absent"):
        refused = shared.complete(name)
        assert refused.status_code == 404
        assert "'other', 'tiny', 'vectors' share a card" in refused.text


@pytest.fixture(scope="module")
def expected(shared: Shared) -> dict[str, str]:
    """The text of each model alone."""
    return {name: shared.text(name) for name in ("tiny", "other")}


def test_streams_under_simultaneous_load_are_those_of_a_model_alone(
    shared: Shared, expected: dict[str, str]
) -> None:
    assert expected["tiny"] != expected["other"]
    vector = shared.vector()
    load = Load(shared, expected)
    threads = [
        threading.Thread(target=load.run, args=(name, index))
        for name in expected
        for index in range(2)
    ]
    for thread in threads:
        thread.start()
    try:
        # Some were running when their model fell asleep.
        until(lambda: shared.metric("swap_kept_requests_total") >= 4 or load.failures)
        assert shared.vector() == vector
    finally:
        load.is_over = True
        for thread in threads:
            thread.join()
    assert load.failures == []
    assert load.num_done >= len(threads)
    for name in shared.engines:
        assert shared.metric("model_wakes_total", model=name) > 0
        assert shared.metric("swap_failures_total", model=name) == 0
        assert shared.metric("swap_waiting_requests", model=name) == 0
    assert len(shared.awake()) == 1


def test_an_engine_killed_with_the_card_costs_its_streams_and_no_others(
    shared: Shared, expected: dict[str, str]
) -> None:
    engine = shared.engines["tiny"]
    with httpx.stream(
        "POST",
        f"{shared.url}/v1/completions",
        json={"model": "tiny", "prompt": PROMPT, "max_tokens": 1500, "stream": True,
              "ignore_eos": True},
        timeout=60,
    ) as stream:  # fmt: skip
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        engine.kill()
        assert any("error" in line for line in lines)
    refused = shared.complete("tiny")
    assert refused.status_code == 503
    engine.start()
    assert shared.text("other") == expected["other"]
    engine.wait_ready(LIVENESS)
    until(lambda: shared.complete("tiny").status_code == 200)
    assert shared.text("tiny") == expected["tiny"]


def test_an_engine_killed_asleep_is_missed_by_its_own_requests_alone(
    shared: Shared, expected: dict[str, str]
) -> None:
    assert shared.text("other") == expected["other"]
    engine = shared.engines["tiny"]
    engine.kill()
    until(lambda: shared.complete("tiny").status_code == 503)
    assert shared.text("other") == expected["other"]
    engine.start()
    until(lambda: shared.complete("tiny").status_code == 200)
    assert shared.text("tiny") == expected["tiny"]
    assert shared.text("other") == expected["other"]
