"""The frontend's figures, as strict tools read them, with several engines and failed requests."""

import grpc
import httpx
import pytest

from protos.frontend.v1 import frontend_pb2 as pb
from services.frontend.pipeline.metrics import FAILED, FINISHED
from tests.support.fake_engine import FakeEngine
from tests.support.frontend_stack import frontend_stack
from tests.support.processes import free_port
from tests.support.strict_metrics import check_page


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
async def test_the_page_is_one_that_strict_tools_take(accept):
    first, second, port = FakeEngine(), FakeEngine(engine_id="engine-2"), free_port()
    async with (
        first,
        second,
        frontend_stack(first, second, http_port=0, metrics_port=port) as stack,
        httpx.AsyncClient(timeout=60) as client,
    ):
        assert [response async for response in stack.stub.Generate(pb.GenerateRequest(text="one"))]
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.stub.Generate(pb.GenerateRequest(text="")).read()
        stack.server.requests.counts.failed.update(FAILED)
        stack.server.requests.counts.finished.update(FINISHED)
        pages = [
            await client.get(url, headers={"accept": accept})
            for url in (f"{stack.http_url}/metrics", f"http://127.0.0.1:{port}/metrics")
        ]
    names = [check_page(page.text, page.headers["content-type"]) for page in pages]
    assert names[0] == names[1]
    assert {"octavo_frontend_engines", "octavo_frontend_requests_failed"} < names[0]
