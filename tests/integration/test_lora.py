"""Adapters through both services: names, rights, HTTP and the command line."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from typer.testing import CliRunner

from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2 import GenerationOptions
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.client.cli import app
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.adapters import Factors, tiny_factors, write_adapter, write_merged_files
from tests.support.processes import Stack, free_port, stack, start_engine, start_frontend

OPERATOR, TENANT, OTHER = (
    f"octavo-{name}-0123456789abcdef" for name in ("operator", "tenant", "other")
)
KEYS = f"""
[keys.operator]
key = "{OPERATOR}"
operator = true
[keys.tenant]
key = "{TENANT}"
adapters = ["first", "tenant-*"]
[keys.other]
key = "{OTHER}"
adapters = []
"""
PROMPT = "The quick brown fox"
INPUTS = [pb.EmbedInput(text=PROMPT)]
MESSAGES = [{"role": "user", "content": PROMPT}]


@dataclass
class Served:
    services: Stack
    folder: Path
    url: str
    factors: Factors

    def client(self, key: str = OPERATOR) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path: str, body: dict[str, object], key: str = OPERATOR) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=60)

    def complete(self, model: str, key: str = OPERATOR) -> str:
        with self.client(key) as client:
            answer = client.completions.create(
                model=model, prompt=PROMPT, max_tokens=12, temperature=0
            )
        assert answer.model == model
        return answer.choices[0].text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("lora")
    factors = tiny_factors(1)
    write_adapter(folder / "adapters" / "first", factors)
    write_adapter(folder / "adapters" / "later", tiny_factors(2))
    (folder / "keys.toml").write_text(KEYS)
    port = free_port()
    engine = start_engine(
        lora=f"first={folder / 'adapters' / 'first'},tenant-b={folder / 'adapters' / 'later'}",
        lora_folder=folder / "adapters",
        max_loras=2,
    )
    frontend = start_frontend(
        engine.address,
        http_port=port,
        api_keys_file=folder / "keys.toml",
        allow_lora_updates=True,
    )
    with Stack(engine, frontend) as services:
        yield Served(services, folder, f"http://127.0.0.1:{port}", factors)


def test_the_models_name_picks_the_adapter(served: Served, tmp_path: Path) -> None:
    base, adapted = served.complete("tiny"), served.complete("first")
    assert base != adapted
    merged = write_merged_files(tmp_path / "merged", TINY_CHECKPOINT, served.factors)
    port = free_port()
    flags = {"model": merged, "served_model_name": "first"}
    with stack(engine=flags, frontend={"http_port": port}):
        alone = Served(served.services, served.folder, f"http://127.0.0.1:{port}", served.factors)
        assert alone.complete("first") == adapted
    assert served.complete("tiny") == base


def test_keys_see_and_use_their_own_adapters(served: Served) -> None:
    for key, names in (
        (OPERATOR, ["tiny", "first", "tenant-b"]),
        (TENANT, ["tiny", "first", "tenant-b"]),
        (OTHER, ["tiny"]),
    ):
        with served.client(key) as client:
            assert [each.id for each in client.models.list()] == names
    served.complete("tenant-b", TENANT)
    answers = []
    for name in ("first", "nothing"):
        with served.client(OTHER) as client, pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model=name, prompt=PROMPT)
        answers.append(str(caught.value).replace(name, "NAME"))
        with served.client(OTHER) as client, pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": PROMPT}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/v1/embeddings", {"input": PROMPT}),
        ("/v1/rerank", {"query": PROMPT, "documents": [PROMPT]}),
        ("/v1/score", {"text_1": PROMPT, "text_2": PROMPT}),
        ("/tokenize", {"prompt": PROMPT}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
)
def test_no_http_api_tells_a_forbidden_adapter_from_an_unknown_one(
    served: Served, path: str, body: dict[str, object]
) -> None:
    answers = []
    for name in ("first", "wrong"):
        answer = served.post(path, {**body, "model": name}, OTHER)
        text = re.sub(r'"(request_)?id":"[^"]*"', "", answer.text.replace(name, "NAME"))
        answers.append((answer.status_code, text))
    assert answers[0] == answers[1]
    assert answers[0][0] == 404


@pytest.mark.parametrize("method", ["Generate", "Chat", "Tokenize", "Detokenize", "Embed", "Score"])
def test_no_call_tells_a_forbidden_adapter_from_an_unknown_one(served: Served, method: str) -> None:
    answers = []
    with grpc.insecure_channel(served.services.frontend.address) as channel:
        stub = FrontendServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        for name in ("first", "wrong"):
            with pytest.raises(grpc.RpcError) as caught:
                list(_answers(stub, method, name))
            answers.append((caught.value.code(), caught.value.details().replace(name, "NAME")))
    assert answers[0] == answers[1]
    assert answers[0][0] is grpc.StatusCode.NOT_FOUND


def _answers(stub: FrontendServiceStub, method: str, name: str) -> Iterator[object]:
    """Yields the answers to a call that names a model."""
    options = GenerationOptions(model=name)
    requests = {
        "Generate": pb.GenerateRequest(text=PROMPT, options=options),
        "Chat": pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content=PROMPT)], options=options
        ),
        "Tokenize": pb.TokenizeRequest(model=name, text=PROMPT),
        "Detokenize": pb.DetokenizeRequest(model=name, token_ids=[5, 6]),
        "Embed": pb.EmbedRequest(options=pb.VectorOptions(model=name), inputs=INPUTS),
        "Score": pb.ScoreRequest(
            options=pb.VectorOptions(model=name), queries=[PROMPT], documents=[PROMPT]
        ),
    }
    metadata = (("authorization", f"Bearer {OTHER}"),)
    answer = getattr(stub, method)(requests[method], metadata=metadata, timeout=60)
    yield from answer if method in ("Generate", "Chat") else [answer]


def test_adapters_are_loaded_and_removed_over_http(served: Served) -> None:
    body = {"lora_name": "new", "lora_path": "later"}
    for key in (TENANT, OTHER):
        assert served.post("/v1/load_lora_adapter", body, key).status_code == 403
        assert (
            served.post("/v1/unload_lora_adapter", {"lora_name": "first"}, key).status_code == 403
        )
    assert served.post("/v1/load_lora_adapter", body).status_code == 200
    assert served.complete("new") == served.complete("tenant-b")
    assert served.post("/v1/load_lora_adapter", body).status_code in (400, 409)
    for path in ("../..", "/etc", "first/../../keys.toml"):
        refused = served.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": path})
        assert refused.status_code == 403, refused.text
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "new"}).status_code == 200
    with served.client() as client, pytest.raises(openai.NotFoundError):
        client.completions.create(model="new", prompt=PROMPT)
    assert served.post("/v1/unload_lora_adapter", {"lora_name": "new"}).status_code == 404


def test_a_bad_adapter_is_refused_with_the_reason(served: Served) -> None:
    pickled = served.folder / "adapters" / "pickled"
    shutil.copytree(served.folder / "adapters" / "first", pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    refused = served.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "pickled"})
    assert refused.status_code == 400
    assert "is a pickle" in refused.json()["error"]["message"]
    served.complete("first")


def test_a_grammar_binds_the_output_of_an_adapter(served: Served) -> None:
    texts = {}
    with served.client() as client:
        for model in ("tiny", "first"):
            answer = client.completions.create(
                model=model,
                prompt=PROMPT,
                max_tokens=40,
                temperature=0,
                extra_body={"structured_outputs": {"regex": "[a-z]{20}"}},
            )
            texts[model] = answer.choices[0].text
    assert all(re.fullmatch("[a-z]{20}", text) for text in texts.values())
    assert texts["tiny"] != texts["first"]


def test_adapters_have_metrics_by_name(served: Served) -> None:
    served.complete("first")
    address = served.services.engine.address
    stats = json.loads(CliRunner().invoke(app, ["stats", "--json", "--engine", address]).output)
    assert stats["adapters"]["num_known"] >= 2
    assert stats["adapters"]["num_slot_loads"] >= 1
    table = CliRunner().invoke(app, ["stats", "--engine", address]).output
    assert "slots in use" in table


def test_the_command_line_adds_lists_and_removes(served: Served) -> None:
    run, address = CliRunner().invoke, served.services.engine.address
    assert (
        "by-hand: rank 4"
        in run(app, ["lora", "add", "by-hand", "later", "--engine", address]).output
    )
    assert "first: rank 4" in run(app, ["lora", "list", "--engine", address]).output
    with served.client() as client:
        while "by-hand" not in [each.id for each in client.models.list()]:
            time.sleep(0.01)
    served.complete("by-hand")
    assert run(app, ["lora", "remove", "by-hand", "--engine", address]).exit_code == 0
    assert "by-hand" not in run(app, ["lora", "list", "--engine", address]).output
