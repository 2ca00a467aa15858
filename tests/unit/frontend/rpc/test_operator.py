"""Adapters of all engines of a frontend, over gRPC and with the command line."""

import asyncio
import hashlib
from contextlib import asynccontextmanager

import grpc
import pytest
from typer.testing import CliRunner

from protos.engine.v1 import operator_pb2 as engine_pb2
from protos.engine.v1.operator_pb2_grpc import OperatorServiceServicer
from protos.frontend.v1 import frontend_pb2, operator_pb2
from protos.frontend.v1.operator_pb2_grpc import OperatorServiceStub
from services.client.cli import app
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack

OPERATOR, TENANT, LIMITED = (
    f"octavo-{name}-0123456789abcdef" for name in ("operator", "tenant", "limited")
)
KEYS = f"""
[keys.operator]
key = "{OPERATOR}"
operator = true
[keys.tenant]
key = "{TENANT}"
adapters = ["mine"]
[keys.limited]
key = "{LIMITED}"
operator = true
adapters = ["mine", "my-*"]
"""
SQL = operator_pb2.LoadAdapterRequest(name="sql", path="adapters/sql")


class Operator(OperatorServiceServicer):
    """The adapters of a fake engine."""

    def __init__(self, *, refuses=False, keeps=False):
        self.refuses = refuses
        self.keeps = keeps
        self.paths = {}

    async def LoadAdapter(self, request, context):  # noqa: N802
        if self.refuses:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "its rank is too large")
        if request.name in self.paths:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "it is taken")
        self.paths[request.name] = request.path
        digest = hashlib.sha256(request.path.encode()).hexdigest()
        return engine_pb2.LoadAdapterResponse(
            adapter=engine_pb2.AdapterInfo(name=request.name, digest=digest)
        )

    async def RemoveAdapter(self, request, context):  # noqa: N802
        if self.keeps:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "its worker was lost")
        self.paths.pop(request.name)
        return engine_pb2.RemoveAdapterResponse()


@asynccontextmanager
async def fleet(tmp_path, *operators, key=OPERATOR):
    """Runs a frontend of an engine for each operator; yields its stack and a call."""
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    engines = [FakeEngine(engine_id=f"e{i}", operator=each) for i, each in enumerate(operators)]
    for engine in engines:
        await engine.start()
    try:
        flags = {"api_keys_file": keys, "allow_lora_updates": True}
        async with frontend_stack(*engines, **flags) as stack:
            stub = OperatorServiceStub(stack.channel)

            def call(method, request, key=key):
                metadata = (("authorization", f"Bearer {key}"),)
                return getattr(stub, method)(request, metadata=metadata)

            yield stack, call
    finally:
        for engine in engines:
            await engine.die()


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def test_all_engines_load_list_and_remove_an_adapter(tmp_path):
    operators = Operator(), Operator()
    async with fleet(tmp_path, *operators) as (_, call):
        loaded = (await call("LoadAdapter", SQL)).adapter
        assert (loaded.name, loaded.num_engines, loaded.num_resident) == ("sql", 2, 0)
        assert [each.paths for each in operators] == [{"sql": "adapters/sql"}] * 2
        listed = await call("ListAdapters", operator_pb2.ListAdaptersRequest())
        assert list(listed.adapters) == [loaded]
        await call("RemoveAdapter", operator_pb2.RemoveAdapterRequest(name="sql"))
        assert [each.paths for each in operators] == [{}, {}]
        code, _ = await refusal(
            call("RemoveAdapter", operator_pb2.RemoveAdapterRequest(name="sql"))
        )
        assert code is grpc.StatusCode.NOT_FOUND


async def test_no_engine_keeps_an_adapter_that_one_refuses(tmp_path):
    operators = Operator(), Operator(refuses=True)
    async with fleet(tmp_path, *operators) as (_, call):
        code, text = await refusal(call("LoadAdapter", SQL))
        assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "its rank is too large")
        assert [each.paths for each in operators] == [{}, {}]
        assert not (await call("ListAdapters", operator_pb2.ListAdaptersRequest())).adapters


async def test_an_engine_that_takes_nothing_back_keeps_others_from_nothing(tmp_path):
    operators = Operator(keeps=True), Operator(), Operator(refuses=True)
    async with fleet(tmp_path, *operators) as (_, call):
        code, text = await refusal(call("LoadAdapter", SQL))
        assert (code, text) == (grpc.StatusCode.INVALID_ARGUMENT, "its rank is too large")
        assert [len(each.paths) for each in operators] == [1, 0, 0]
        [kept] = (await call("ListAdapters", operator_pb2.ListAdaptersRequest())).adapters
        assert (kept.name, kept.num_engines) == ("sql", 1)


async def test_an_engine_that_removes_nothing_keeps_others_from_nothing(tmp_path):
    operators = Operator(keeps=True), Operator()
    async with fleet(tmp_path, *operators) as (_, call):
        await call("LoadAdapter", SQL)
        remove = operator_pb2.RemoveAdapterRequest(name="sql")
        code, text = await refusal(call("RemoveAdapter", remove))
        assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "its worker was lost")
        assert [len(each.paths) for each in operators] == [1, 0]
        operators[0].keeps = False
        await call("RemoveAdapter", remove)
        assert not operators[0].paths


async def test_keys_without_the_right_change_and_see_nothing(tmp_path):
    operator = Operator()
    async with fleet(tmp_path, operator, key=TENANT) as (_, call):
        for method, request in (
            ("LoadAdapter", SQL),
            ("RemoveAdapter", operator_pb2.RemoveAdapterRequest(name="sql")),
            ("ListAdapters", operator_pb2.ListAdaptersRequest()),
        ):
            code, _ = await refusal(call(method, request))
            assert code is grpc.StatusCode.PERMISSION_DENIED
        assert not operator.paths


async def test_operators_change_and_see_only_the_adapters_of_their_rule(tmp_path):
    operator = Operator()
    async with fleet(tmp_path, operator) as (_, call):
        await call("LoadAdapter", SQL)
        mine = operator_pb2.LoadAdapterRequest(name="my-sql", path="adapters/sql")
        await call("LoadAdapter", mine, LIMITED)
        listed = await call("ListAdapters", operator_pb2.ListAdaptersRequest(), LIMITED)
        assert [each.name for each in listed.adapters] == ["my-sql"]
        answers = []
        for name in ("sql", "absent"):
            load = operator_pb2.LoadAdapterRequest(name=name, path="adapters/sql")
            remove = operator_pb2.RemoveAdapterRequest(name=name)
            answers.append(
                [
                    await refusal(call("LoadAdapter", load, LIMITED)),
                    await refusal(call("RemoveAdapter", remove, LIMITED)),
                ]
            )
        assert answers[0] == answers[1]
        assert {code for code, _ in answers[0]} == {grpc.StatusCode.PERMISSION_DENIED}
        assert set(operator.paths) == {"sql", "my-sql"}
        await call("RemoveAdapter", operator_pb2.RemoveAdapterRequest(name="my-sql"), LIMITED)
        assert set(operator.paths) == {"sql"}


async def test_a_frontend_without_the_flag_has_no_such_calls():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        code, _ = await refusal(OperatorServiceStub(stack.channel).LoadAdapter(SQL))
        assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_forbidden_adapter_is_refused_like_an_unknown_one(tmp_path):
    async with fleet(tmp_path, Operator()) as (stack, call):
        await call("LoadAdapter", SQL)
        answers = []
        for name in ("sql", "absent"):
            request = frontend_pb2.GenerateRequest(
                text="hello", options=frontend_pb2.GenerationOptions(model=name)
            )
            metadata = (("authorization", f"Bearer {TENANT}"),)
            code, text = await refusal(stack.stub.Generate(request, metadata=metadata).read())
            answers.append((code, text.replace(name, "NAME")))
        assert answers[0] == answers[1]
        assert answers[0][0] is grpc.StatusCode.NOT_FOUND


async def test_the_command_line_orders_at_a_frontend(tmp_path):
    operators = Operator(), Operator()
    (tmp_path / "key").write_text(OPERATOR)
    async with fleet(tmp_path, *operators) as (stack, _):

        def run(*arguments):
            flags = ["--frontend", stack.address, "--api-key-file", str(tmp_path / "key")]
            return CliRunner().invoke(app, ["lora", *arguments, *flags])

        added = await asyncio.to_thread(run, "add", "sql", "adapters/sql")
        assert added.output == "sql: 2 engines, on 0 devices\n"
        listed = await asyncio.to_thread(run, "list")
        assert listed.output == added.output
        removed = await asyncio.to_thread(run, "remove", "sql")
        assert removed.exit_code == 0
        assert [each.paths for each in operators] == [{}, {}]
