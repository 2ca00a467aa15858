"""`octavo why` against real services that are short of blocks and of rows."""

import asyncio
import json
import os

import httpx

from services.client.client import OctavoClient
from services.client.requests import Options, Sampling
from tests.support.forked_program import run_octavo
from tests.support.processes import free_port, stack

NUM_REQUESTS = 6


async def test_requests_that_waited_and_were_preempted_say_so():
    engine = {"num_kv_blocks": 14, "max_num_seqs": 3, "enable_prefix_caching": False}
    port = free_port()
    async with stack(engine=engine, frontend={"http_port": port}) as services:
        address = services.frontend.address
        sampling = Sampling(temperature=0, max_tokens=80, ignore_eos=True)
        async with OctavoClient(address) as client:
            await asyncio.gather(
                *(
                    client.generate(
                        "Once upon a time", Options(request_id=f"r{n}", sampling=sampling)
                    ).completion()
                    for n in range(NUM_REQUESTS)
                )
            )
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1") as http:
                body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 2}
                over_http = (await http.post("/completions", json=body, timeout=60)).json()["id"]
        environment = os.environ | {"OCTAVO_FRONTEND": address}

        def why(*arguments: str) -> str:
            finished = run_octavo("why", *arguments, environment=environment, given="")
            assert finished.returncode == 0, finished.stderr
            return finished.stdout

        told = {n: json.loads(why(f"r{n}", "--json")) for n in range(NUM_REQUESTS)}
        stages: set[str] = set()
        for story in told.values():
            assert story["frontend"]["end"] == "length"
            [part] = story["engines"]
            own = part["story"]
            assert own["output_tokens"] == 80
            total = sum(each["seconds"] for each in own["stages"])
            assert abs(total - own["duration_s"]) < 1e-6
            assert own["longest_gap"]["seconds"] <= own["duration_s"]
            stages |= {each["stage"].removeprefix("REQUEST_STAGE_") for each in own["stages"]}
        assert {"QUEUED", "PREFILL", "DECODE"} <= stages
        assert stages & {"FULL_ROWS", "FULL_CACHE"}
        assert any(story["engines"][0]["story"].get("num_preemptions") for story in told.values())
        assert "decode in" in why("r0")
        assert "decode in" in why("r0", "--engine", services.engine.address)
        assert "HttpCompletion" in why(over_http)
        unknown = run_octavo("why", "never", environment=environment, given="")
        assert unknown.returncode == 1
        assert "no live request of yours has this id" in unknown.stderr
