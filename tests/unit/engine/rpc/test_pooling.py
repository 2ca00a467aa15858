"""Requests for vectors over a session, around a fake worker."""

import grpc
import numpy as np
import pytest

from models.config_sections.pooling import PoolingConfig
from protos.common.v1 import sampling_pb2
from protos.engine.v1.engine_pb2 import (
    Abort,
    FrontendHello,
    FrontendMessage,
    GenerateRequest,
    GetModelInfoRequest,
    PoolingTask,
    Submit,
)
from tests.support.engine_harness import (
    MAX_MODEL_LEN,
    engine_config,
    model_folder,
    running_service,
)
from tests.support.fake_worker import expected_vector
from tests.support.waiting import until

EMBEDDER = PoolingConfig(
    task="embed", is_normalized=True, prompts=(("query", "find: "),), default_prompt_name="query"
)


def service(pooling=EMBEDDER, **options):
    config = engine_config(task=pooling.task if pooling else "generate")
    return running_service(config, model=model_folder(pooling=pooling), **options)


class Frontend:
    """The other end of a session."""

    def __init__(self, stub):
        self._call = stub.Session()
        self.finished, self.rejected = {}, {}

    async def open(self):
        await self._call.write(FrontendMessage(hello=FrontendHello(frontend_id="test")))
        return self

    async def submit(self, handle, prompt, **fields):
        packed = np.array(prompt, "<u4").tobytes()
        fields = {"pool": True, **fields}
        submit = Submit(handle=handle, request_id=f"r{handle}", prompt_token_ids=packed, **fields)
        await self._call.write(FrontendMessage(submit=submit))

    async def abort(self, handle):
        await self._call.write(FrontendMessage(abort=Abort(handles=[handle])))

    async def read(self, count):
        """Reads until as many requests have ended or were rejected."""
        while len(self.finished) + len(self.rejected) < count:
            message = await self._call.read()
            for each in message.step.finished:
                self.finished[each.handle] = each
            if message.HasField("rejected"):
                self.rejected[message.rejected.handle] = message.rejected.failure


async def test_each_prompt_gets_its_vector_and_no_token():
    async with service() as running:
        frontend = await Frontend(running.stub).open()
        prompts = {handle: range(handle, handle + 5 * handle) for handle in range(1, 9)}
        for handle, prompt in prompts.items():
            await frontend.submit(handle, prompt)
        await frontend.read(len(prompts))
        for handle, prompt in prompts.items():
            finished = frontend.finished[handle]
            assert np.frombuffer(finished.vector, "<f4").tolist() == expected_vector(prompt)
            assert finished.finish_reason == sampling_pb2.FINISH_REASON_STOP
            assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (len(prompt), 0)


async def test_a_prompt_may_fill_the_context_and_no_more():
    async with service() as running:
        frontend = await Frontend(running.stub).open()
        await frontend.submit(1, [3] * MAX_MODEL_LEN)
        await frontend.submit(2, [3] * (MAX_MODEL_LEN + 1))
        await frontend.read(2)
        assert frontend.finished[1].vector
        assert frontend.rejected[2].message == "the prompt has 257 tokens; the limit is 256"


async def test_an_aborted_request_has_no_vector():
    async with service(num_steps=0) as running:
        frontend = await Frontend(running.stub).open()
        await frontend.submit(1, [3] * 100)
        await frontend.abort(1)
        await frontend.read(1)
        assert frontend.finished[1].finish_reason == sampling_pb2.FINISH_REASON_ABORTED
        assert not frontend.finished[1].vector


async def test_requests_of_a_lost_worker_get_their_vectors_from_the_next():
    async with service(num_steps=0) as running:
        frontend = await Frontend(running.stub).open()
        await frontend.submit(1, [3] * 100)
        await until(lambda: running.core.load().num_running)
        running.executors.last.die()
        running.executors.options["num_steps"] = 100
        await frontend.read(1)
        vector = np.frombuffer(frontend.finished[1].vector, "<f4").tolist()
        assert vector == expected_vector([3] * 100)


@pytest.mark.parametrize(
    ("pooling", "fields", "message"),
    [
        (EMBEDDER, {"pool": False}, "is served with --task embed: it generates no tokens"),
        (None, {}, "is served to generate: vectors and scores need --task embed"),
        (EMBEDDER, {"sampling": {"max_tokens": 3}}, "sampling does not go with pool"),
    ],
)
async def test_requests_of_another_kind_are_refused(pooling, fields, message):
    async with service(pooling) as running:
        frontend = await Frontend(running.stub).open()
        await frontend.submit(1, [1, 2, 3], **fields)
        await frontend.read(1)
        assert message in frontend.rejected[1].message
        assert frontend.rejected[1].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_generate_is_refused_by_an_engine_that_pools():
    async with service() as running:
        with pytest.raises(grpc.aio.AioRpcError, match="it generates no tokens") as refusal:
            await running.stub.Generate(GenerateRequest(prompt_token_ids=[1])).read()
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_model_info_has_the_prompts_and_the_size():
    async with service() as running:
        pooling = (await running.stub.GetModelInfo(GetModelInfoRequest())).pooling
        assert pooling.task == PoolingTask.POOLING_TASK_EMBED
        assert (pooling.size, pooling.is_normalized) == (192, True)
        assert pooling.max_input_tokens == MAX_MODEL_LEN
        assert dict(pooling.prompts) == {"query": "find: "}
        assert pooling.default_prompt_name == "query"
        assert not pooling.HasField("pair")
    async with service(PoolingConfig(task="score", answers=(1, 2))) as running:
        pooling = (await running.stub.GetModelInfo(GetModelInfoRequest())).pooling
        assert pooling.size == 1
        assert "{query}" in pooling.pair.text
    async with running_service() as running:
        assert not (await running.stub.GetModelInfo(GetModelInfoRequest())).HasField("pooling")
