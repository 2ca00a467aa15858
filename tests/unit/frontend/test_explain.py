"""Where the time of a request went, asked of the frontend."""

import grpc
import pytest

from protos.frontend.v1 import frontend_pb2 as pb
from services.client.commands.why import rows
from services.frontend.access.key_file import digest_of
from services.frontend.pipeline.recent_requests import RecentRequests, RequestStory
from tests.support.fake_engine import FakeEngine, says
from tests.support.frontend_stack import frontend_stack
from tests.support.waiting import until


def generate(request_id, **options):
    options = pb.GenerationOptions(request_id=request_id, **options)
    return pb.GenerateRequest(text="hi", options=options)


async def run(stack, request_id, **options):
    return [part async for part in stack.stub.Generate(generate(request_id, **options))]


async def explain(stack, request_id, **call):
    request = pb.ExplainRequestRequest(request_id=request_id)
    return await stack.stub.ExplainRequest(request, **call)


async def refusal(stack, request_id, **call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await explain(stack, request_id, **call)
    return caught.value.code(), caught.value.details()


async def test_both_services_say_where_the_time_went():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        await run(stack, "r")
        story = await explain(stack, "r")
    own = story.frontend
    assert (own.method, own.end) == ("Generate", "stop")
    parts = own.tokenize_s + own.submit_s + own.first_output_s + own.stream_s
    assert parts == pytest.approx(own.duration_s)
    [part] = story.engines
    assert (part.address, part.left_because, part.missing) == (engine.address, "", "")
    assert part.story.request_id == "r"
    text = "\n".join(what for _, _, what in rows(story))
    assert "Generate, ended (stop)" in text
    assert "decode" in text


async def test_a_live_request_has_its_progress():
    async with FakeEngine(hold_at=1) as engine, frontend_stack(engine) as stack:
        call = stack.stub.Generate(generate("r"))
        await call.read()
        own = (await explain(stack, "r")).frontend
        assert own.end == ""
        assert own.HasField("stream_s")
        call.cancel()
        await until(lambda: engine.aborted)
        await until(lambda: stack.server._pipeline.requests.counts.num_live == 0)
        assert (await explain(stack, "r")).frontend.end == "cancelled"


async def test_a_request_that_moved_names_both_engines_and_why():
    first = FakeEngine(engine_id="one", hold_at=1)
    second = FakeEngine(engine_id="two", load={"num_used_blocks": 50})
    async with first, second, frontend_stack(first, second) as stack:
        view = stack.server.engine.engines[1].view
        await until(lambda: view.heartbeat.num_used_blocks == 50)
        call = stack.stub.Generate(generate("r"))
        await call.read()
        await first.die()
        while await call.read() is not grpc.aio.EOF:
            pass
        story = await explain(stack, "r")
    lost, last = story.engines
    assert (lost.address, last.address) == (first.address, second.address)
    assert lost.left_because
    assert lost.missing
    assert (last.left_because, last.story.engine_id) == ("", "two")
    assert any("left for another engine" in what for _, _, what in rows(story))


async def test_each_output_of_several_can_be_asked_for():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        await run(stack, "r", n=2)
        for request_id in ("r", "r#1"):
            [part] = (await explain(stack, request_id)).engines
            assert part.story.request_id == request_id
        assert not (await explain(stack, "r#2")).engines


async def test_the_time_of_unread_output_is_counted():
    async with FakeEngine(script=says("a b c d e f")) as engine, frontend_stack(engine) as stack:
        route_of = stack.server._pipeline.requests.recent
        await run(stack, "r")
        [route] = route_of.find("r").routes
        assert 0 < route.unread_s < 60
        assert (await explain(stack, "r")).frontend.unread_s == route.unread_s


async def test_engines_answer_for_requests_of_another_process():
    engine = FakeEngine(served_elsewhere=["r"])
    async with engine, FakeEngine(engine_id="two") as idle, frontend_stack(engine, idle) as stack:
        story = await explain(stack, "r")
        assert not story.HasField("frontend")
        [part] = story.engines
        assert part.address == engine.address


@pytest.mark.parametrize("request_id", ["", "x" * 129])
async def test_what_is_no_id_is_refused(request_id):
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        code, _ = await refusal(stack, request_id)
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_request_is_not_found():
    async with FakeEngine() as engine, frontend_stack(engine) as stack:
        assert await refusal(stack, "r") == (
            grpc.StatusCode.NOT_FOUND,
            "no live request of yours has this id, and no recent one",
        )


async def test_a_key_sees_its_own_requests_and_no_others(tmp_path):
    keys = {name: f"sk-{name * 20}" for name in ("a", "b")}
    path = tmp_path / "keys.toml"
    text = [f'[keys.{name}]\nsha256 = "{digest_of(key).hex()}"' for name, key in keys.items()]
    path.write_text("\n".join([*text, "may_list_engines = true"]))
    metadata = {name: [("authorization", f"Bearer {key}")] for name, key in keys.items()}
    async with FakeEngine() as engine, frontend_stack(engine, api_keys_file=path) as stack:
        for name in "ab":
            call = stack.stub.Generate(generate(f"of-{name}"), metadata=metadata[name])
            async for _ in call:
                pass
        [part] = (await explain(stack, "of-a", metadata=metadata["a"])).engines
        assert (part.address, part.story.request_id) == ("", "of-a/a")
        [part] = (await explain(stack, "of-b", metadata=metadata["b"])).engines
        assert part.address == engine.address
        unknown = await refusal(stack, "of-c", metadata=metadata["a"])
        assert await refusal(stack, "of-b", metadata=metadata["a"]) == unknown
        code, _ = await refusal(stack, "of-a")
        assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_a_key_asks_within_its_slots(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text('[keys.a]\nkey = "a-0123456789abcdef"\nmax_live_requests = 1\n')
    call = {"metadata": [("authorization", "Bearer a-0123456789abcdef")]}
    engine = FakeEngine(hold_at=1)
    async with engine, frontend_stack(engine, api_keys_file=path) as stack:
        live = stack.stub.Generate(generate("r"), **call)
        await live.read()
        code, _ = await refusal(stack, "other", **call)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        live.cancel()


def test_the_oldest_request_is_forgotten():
    recent = RecentRequests(max_requests=2)
    for request_id in "abac":
        recent.add(request_id, RequestStory(method=request_id, start_s=0.0))
    assert recent.find("b") is None
    assert recent.find("a") is not None


def test_every_line_is_told():
    story = pb.ExplainRequestResponse()
    part = story.engines.add(address="e:1")
    part.story.CopyFrom(
        type(part.story)(
            duration_s=3, stages=[{"stage": stage, "seconds": 1} for stage in range(1, 13)],
            num_prefill_steps=1, num_decode_steps=20, num_preemptions=1, num_losses=2,
            num_recomputed_tokens=90, resumed_tokens=4,
            longest_gap={"seconds": 0.5, "step_id": 7, "num_tokens": 2049, "batch_size": 2},
        )
    )  # fmt: skip
    text = "\n".join(what for _, _, what in rows(story))
    for told in (
        "prefill in 1 step\n", "decode in 20 steps", "preempted once", "lost under it 2 times",
        "90 computed tokens were lost", "4 tokens of output came from another engine",
        "step, 7, with 2049 tokens of 2 requests", "free blocks", "new worker", "still live",
    ):  # fmt: skip
        assert told in text
