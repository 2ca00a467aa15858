"""A key keeps its caller's choices apart from those of others: salts, ids, priorities."""

import grpc
import httpx
import pytest

from protos.frontend.v1 import frontend_pb2 as pb
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack

KEYS = {name: f"{name}-0123456789abcdef" for name in ("alice", "bob", "shared", "urgent")}
ENTRIES = {
    "alice": "salt_by_key = true",
    "bob": "salt_by_key = true",
    "shared": "",
    "urgent": "max_priority = 7",
}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(
        "".join(f'[keys.{name}]\nkey = "{KEYS[name]}"\n{ENTRIES[name]}\n' for name in KEYS)
    )
    return path


async def ask(stack, caller: str, **options: object) -> None:
    request = pb.GenerateRequest(text="one two", options=pb.GenerationOptions(**options))
    metadata = (("authorization", f"Bearer {KEYS[caller]}"),)
    async for _ in stack.stub.Generate(request, metadata=metadata):
        pass


async def test_a_keyed_salt_is_one_that_no_other_key_can_spell(key_file):
    async with FakeEngine() as engine, frontend_stack(engine, api_keys_file=key_file) as stack:
        for salt in ("", "x", ""):
            await ask(stack, "alice", cache_salt=salt)
        alices = [submit.cache_salt for submit in engine.submits]
        assert alices[0] == alices[2] != alices[1]
        for spelled in ("", "x", *alices):
            await ask(stack, "bob", cache_salt=spelled)
        bobs = [submit.cache_salt for submit in engine.submits[3:]]
        assert set(bobs).isdisjoint({"", "x", *alices})
        await ask(stack, "shared", cache_salt="x")
        assert engine.submits[-1].cache_salt == "x"


async def test_request_ids_are_each_keys_own(key_file):
    async with FakeEngine() as engine, frontend_stack(engine, api_keys_file=key_file) as stack:
        await ask(stack, "alice", request_id="the-same")
        await ask(stack, "bob", request_id="the-same")
        await ask(stack, "bob", request_id="the-same/alice")
        ids = [submit.request_id for submit in engine.submits]
        assert ids == ["the-same/alice", "the-same/bob", "the-same/alice/bob"]


@pytest.mark.parametrize(("caller", "highest"), [("shared", 0), ("urgent", 7)])
async def test_a_key_has_the_priority_that_it_is_given(key_file, caller, highest):
    async with FakeEngine() as engine, frontend_stack(engine, api_keys_file=key_file) as stack:
        for priority in (highest, -100):
            await ask(stack, caller, priority=priority)
        assert [submit.priority for submit in engine.submits] == [highest, -100]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(stack, caller, priority=highest + 1)
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        assert f"at most {highest}" in refused.value.details()
        assert len(engine.submits) == 2


async def test_without_keys_any_priority_goes_on_to_the_engine():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        request = pb.GenerateRequest(text="one", options={"priority": 100, "request_id": "mine"})
        assert [response async for response in stack.stub.Generate(request)]
        assert (engine.submits[0].priority, engine.submits[0].request_id) == (100, "mine")


async def test_a_call_with_two_keys_is_refused(key_file):
    alice, bob = (f"Bearer {KEYS[name]}" for name in ("alice", "bob"))
    async with (
        FakeEngine() as engine,
        frontend_stack(engine, api_keys_file=key_file, http_port=0) as stack,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{stack.server.http_port}") as client,
    ):
        for values in ((alice, bob), (alice, alice), ("", alice)):
            call = stack.stub.ListModels(
                pb.ListModelsRequest(), metadata=[("authorization", value) for value in values]
            )
            assert await call.code() == grpc.StatusCode.UNAUTHENTICATED
            headers = [("authorization", value) for value in values]
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        for key in ("alice", "bob"):
            headers = [("x-api-key", KEYS["alice"]), ("x-api-key", KEYS[key])]
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        headers = [("x-api-key", KEYS["alice"]), ("authorization", bob)]
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
