"""Paths that are not served, and the page at the root."""

import pytest
from starlette.routing import Route

from services.frontend.http.app import nearest_path
from services.frontend.http.service.start_page import start_page
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack
from tests.support.responses import running

ROUTES = [
    Route(path, lambda request: None, methods=["POST"])
    for path in (
        "/",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses/{response_id}",
        "/v1/models/{name:path}",
        "/health",
    )
]


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/completions", "/v1/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/responses/resp_1", "/v1/responses/resp_1"),
        ("/v1/health", "/health"),
        ("/v1/audio/speech", None),
        ("/" + "x" * 9000, None),
        ("//", None),
    ],
)
def test_the_nearest_served_path_is_found(path, nearest):
    assert nearest_path(path, ROUTES) == nearest


async def test_paths_that_are_not_there_are_404_and_name_the_nearest():
    async with running() as (_, _, client):
        plain = await client.post("/chat/completions", json={})
        far = await client.get("/v1/audio/voices")
        below = await client.post("/v1/responses/resp_1/cancel")
        named = await client.post("/v1/responses/made_up", json={})
        compact = await client.post("/v1/responses/compact", json={})
        method = await client.get("/v1/responses")
    answers = [plain, far, below, named, compact, method]
    assert [each.status_code for each in answers] == [404, 404, 404, 404, 404, 405]
    messages = [each.json()["error"]["message"] for each in answers]
    assert messages[0] == "POST /chat/completions is not served; /v1/chat/completions is"
    assert messages[1] == "GET /v1/audio/voices is not served; GET / lists what is"
    assert "compaction" in messages[4]
    assert compact.json()["error"]["code"] == "unsupported_endpoint"


async def test_the_page_at_the_root_names_the_model_and_loads_nothing():
    async with running() as (_, _, client):
        page = await client.get("/")
        links = [part.split('"')[0] for part in page.text.split('href="')[1:]]
        found = [(await client.get(link)).status_code for link in links]
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<code>fake</code>" in page.text
    assert found == [200] * 5
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    for loader in ("src=", "<script", "http://", "https://", "@import"):
        assert loader not in page.text


def test_the_page_escapes_the_model():
    page = start_page(model="<script>alert(1)</script>", version="1&2").body.decode()
    assert "&lt;script&gt;" in page
    assert "1&amp;2" in page
    assert "<script" not in page


async def test_the_page_needs_no_key_and_then_names_no_model(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[keys.a]\nkey = "alice-0123456789abcdef"\n')
    async with (
        FakeEngine() as engine,
        frontend_stack(engine, http_port=0, api_keys_file=path) as stack,
        stack.http_client() as client,
    ):
        page = await client.get("/")
        other = await client.get("/v1/nothing")
    assert (page.status_code, other.status_code) == (200, 401)
    assert "fake" not in page.text
