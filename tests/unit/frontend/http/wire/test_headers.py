"""Ids, compressed bodies, and web pages of other origins."""

import gzip
import json
import zlib

import pytest
import structlog

from services.frontend.config import FrontendConfig
from tests.support.fake_engine import FakeEngine
from tests.unit.frontend.http.test_app import CHAT, COMPLETION, http_stack

JSON = {"content-type": "application/json"}
ORIGIN = "https://page.example"


async def test_the_id_of_the_caller_is_returned_and_logged():
    async with http_stack() as (stack, client):
        with structlog.testing.capture_logs(
            processors=[structlog.contextvars.merge_contextvars]
        ) as logs:
            answers = [
                await client.post(path, json=body, headers={"x-request-id": "trace-1"})
                for path, body in (
                    ("/v1/chat/completions", CHAT),
                    ("/v1/chat/completions", CHAT),
                    ("/v1/completions", COMPLETION | {"temperature": 3}),
                    ("/tokenize", CHAT),
                    ("/nothing", {}),
                )
            ]
    assert {answer.headers["x-request-id"] for answer in answers} == {"trace-1"}
    ids = [submit.request_id for submit in stack.engine.submits]
    assert all(each.startswith("chatcmpl-trace-1-") for each in ids)
    assert len(set(ids)) == 2
    [*finished] = [line["request_id"] for line in logs if line["event"] == "request_finished"]
    assert finished == ids


@pytest.mark.parametrize("given", ["", "x" * 65, "a b", "a#1", "a/b", "\xe9"])
async def test_a_wrong_id_is_refused(given):
    async with http_stack() as (stack, client):
        response = await client.post(
            "/v1/completions", json=COMPLETION, headers={b"x-request-id": given.encode("latin-1")}
        )
    assert response.status_code == 400
    assert "x-request-id" in response.json()["error"]["message"]
    assert not stack.engine.submits


@pytest.mark.parametrize(
    ("name", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_compressed_bodies_are_read(name, compress):
    content = compress(json.dumps(COMPLETION).encode())
    async with http_stack() as (_, client):
        response = await client.post(
            "/v1/completions", content=content, headers=JSON | {"content-encoding": name}
        )
    assert response.json()["choices"][0]["text"] == "hello world"


@pytest.mark.parametrize(
    ("encoding", "content", "status"),
    [
        ("br", b"{}", 415),
        ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), 415),
        ("gzip", b"{}", 400),
        ("gzip", gzip.compress(b"{}")[:-3], 400),
        ("gzip", gzip.compress(b"{}") * 2, 400),
        ("deflate", gzip.compress(b"{}"), 400),
        ("gzip", gzip.compress(b" " * 2**24), 413),
    ],
    ids=["br", "twice", "plain", "cut", "members", "other", "bomb"],
)
async def test_what_cannot_be_decompressed_is_refused(encoding, content, status):
    async with http_stack(max_message_bytes=2**20) as (_, client):
        response = await client.post(
            "/v1/completions", content=content, headers=JSON | {"content-encoding": encoding}
        )
        fine = await client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == status
    assert fine.status_code == 200


async def test_pages_of_the_origins_given_may_use_the_api():
    headers = {"origin": ORIGIN, "access-control-request-method": "POST"}
    async with http_stack(cors_origins=f"{ORIGIN},http://localhost:3000") as (_, client):
        asked = await client.options("/v1/chat/completions", headers=headers)
        answer = await client.post(
            "/v1/chat/completions", json=CHAT, headers={"origin": ORIGIN, "x-request-id": "a"}
        )
        other = await client.options(
            "/v1/chat/completions", headers=headers | {"origin": "https://other.example"}
        )
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert other.status_code == 400


async def test_no_page_may_use_the_api_by_default():
    async with http_stack(FakeEngine()) as (_, client):
        answer = await client.post("/v1/completions", json=COMPLETION, headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/messages", "/metrics", "/health", "/nothing"]
)
async def test_a_page_whose_name_became_a_loopback_address_is_refused(path):
    async with http_stack() as (stack, client):
        refused = await client.post(path, json=COMPLETION, headers={"host": "evil.example:8000"})
        fine = await client.get("/metrics", headers={"host": "localhost:8000"})
    assert (refused.status_code, fine.status_code) == (403, 200)
    assert "--allowed-hosts" in refused.json()["error"]["message"]
    assert not stack.engine.submits


async def test_hosts_that_are_named_are_answered():
    async with http_stack(allowed_hosts="chat.example,frontend") as (_, client):
        answers = [
            await client.get("/health", headers={"host": host})
            for host in ("chat.example", "frontend:8000", "127.0.0.1:1", "evil.example")
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 403]


@pytest.mark.parametrize(("named", "status"), [({}, 200), ({"allowed_hosts": "chat.example"}, 403)])
async def test_with_keys_all_hosts_are_answered_unless_some_are_named(tmp_path, named, status):
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.alice]\nkey = "alice-0123456789abcdef"\n')
    async with http_stack(api_keys_file=keys, **named) as (_, client):
        headers = {"host": "other.example", "authorization": "Bearer alice-0123456789abcdef"}
        answer = await client.get("/v1/models", headers=headers)
    assert answer.status_code == status


@pytest.mark.parametrize("hosts", ["a.example:80", "https://a.example", "a,,b", "*", ""])
def test_names_of_hosts_are_checked_at_the_start(hosts):
    with pytest.raises(ValueError, match="allowed_hosts"):
        FrontendConfig(allowed_hosts=hosts)


@pytest.mark.parametrize("origins", ["page.example", "https://a.example/path", "*,https://a", ""])
def test_origins_are_checked_at_the_start(origins):
    with pytest.raises(ValueError, match="cors_origins"):
        FrontendConfig(cors_origins=origins)
