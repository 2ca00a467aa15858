"""Real services at their most talkative, with marked prompts, keys and outputs: none is logged."""

import asyncio
import contextlib
import ssl
import struct
from pathlib import Path

import grpc
import httpx

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.support.certificates import LOOPBACK, Authority, credentials
from tests.support.processes import Stack, free_port, start_engine, start_frontend
from tests.support.raw_http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    call_headers,
    frame,
    message_start,
    raw_connection,
)
from tests.support.waiting import until

KEY = "octavo-MARKEDKEY-0123456789"
WRONG_KEY = "octavo-MARKEDGUESS-0123456789"
PROMPT = "Tell MARKEDPROMPT a story about Mia and Tom"
SALT = "MARKEDSALT"
STOP = "MARKEDSTOP"
MARK = "MARKED"


def options(**fields: object) -> pb.GenerationOptions:
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return pb.GenerationOptions(
        **{"sampling": sampling, "stop": [STOP], "cache_salt": SALT, **fields}
    )


async def read_all(call) -> list[pb.Output]:
    """Reads a stream to its end, whichever end that is."""
    outputs = []
    with contextlib.suppress(grpc.aio.AioRpcError):
        while (response := await call.read()) is not grpc.aio.EOF:
            outputs.append(response.output)
    return outputs


async def use_grpc(stub: FrontendServiceStub) -> list[pb.Output]:
    """Calls that end well, that are refused, that are cancelled and that no caller may make."""
    known = [("authorization", f"Bearer {KEY}")]
    said = await read_all(
        stub.Generate(pb.GenerateRequest(text=PROMPT, options=options()), metadata=known)
    )
    message = pb.ChatMessage(role="user", content=PROMPT)
    said += await read_all(
        stub.Chat(pb.ChatRequest(messages=[message], options=options()), metadata=known)
    )
    refused = [
        pb.GenerateRequest(text=PROMPT * 1000, options=options()),
        pb.GenerateRequest(text=PROMPT, options=options(model=PROMPT)),
        pb.GenerateRequest(text=PROMPT, options=options(stop=[PROMPT] * 99)),
        pb.GenerateRequest(text=PROMPT, options=options(cache_salt=SALT * 99)),
        pb.GenerateRequest(text=PROMPT, options=options(sampling=SamplingParams(top_p=9))),
    ]
    for request in refused:
        assert not await read_all(stub.Generate(request, metadata=known))
    wrong_role = pb.ChatMessage(role=PROMPT, content=PROMPT)
    assert not await read_all(stub.Chat(pb.ChatRequest(messages=[wrong_role]), metadata=known))
    unknown = [("authorization", f"Bearer {WRONG_KEY}")]
    assert not await read_all(stub.Generate(refused[0], metadata=unknown))
    endless = SamplingParams(max_tokens=1500, ignore_eos=True)
    left = stub.Generate(
        pb.GenerateRequest(text=PROMPT, options=options(sampling=endless)), metadata=known
    )
    await left.read()
    left.cancel()
    return said


async def use_http(client: httpx.AsyncClient) -> list[str]:
    """The same over HTTP."""
    headers = {"authorization": f"Bearer {KEY}"}
    wish = {"model": "tiny", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stop": STOP}
    messages = [{"role": "user", "content": PROMPT}]
    chat = await client.post(
        "/v1/chat/completions", json=wish | {"messages": messages}, headers=headers
    )
    bodies: list[object] = [
        {"prompt": PROMPT},
        wish | {"prompt": {PROMPT: PROMPT}},
        wish | {"prompt": PROMPT, PROMPT: PROMPT},
        wish | {"messages": [{"role": "user", "content": {PROMPT: PROMPT}}]},
    ]
    for body in bodies:
        for path in ("/v1/completions", f"/v1/completions?{MARK}=1"):
            answer = await client.post(path, json=body, headers=headers)
            assert answer.status_code == 400
    broken = await client.post(
        "/v1/completions",
        content=f'{{"prompt": "{PROMPT}',
        headers={**headers, "content-type": "application/json"},
    )
    guessed = await client.post(
        "/v1/completions", json=wish, headers={"authorization": f"Bearer {WRONG_KEY}"}
    )
    assert (broken.status_code, guessed.status_code) == (400, 401)
    return [chat.json()["choices"][0]["message"]["content"]]


async def use_raw_http2(address: str, context: ssl.SSLContext) -> None:
    """A key that gRPC cannot read as text, and a goodbye with text and a line of its own."""
    context.set_alpn_protocols(["h2"])
    async with raw_connection(address, context) as connection:
        path = "/octavo.frontend.v1.FrontendService/ListModels"
        headers = call_headers(path, authorization=f"Bearer {KEY}")
        headers = headers.replace(KEY.encode(), KEY[:-1].encode() + b"\xa0")
        nothing = frame(DATA, END_STREAM, 1, message_start(0, b""))
        connection.send(frame(HEADERS, END_HEADERS, 1, headers), nothing)
        await connection.ended_stream()
        goodbye = struct.pack(">II", 0, 2) + f"\x1b]0;{MARK}\x07\n{MARK}".encode()
        connection.send(frame(GOAWAY, 0, 0, goodbye))
        await connection.drain()


async def test_no_prompt_no_output_and_no_key_is_in_any_log(tmp_path: Path):
    authority = Authority(tmp_path)
    pair = authority.issue("server", LOOPBACK)
    key_file = tmp_path / "keys.toml"
    key_file.write_text(f'[keys.alice]\nkey = "{KEY}"\n')
    shown = credentials(authority, pair)
    tls = {"tls_cert": pair.cert, "tls_key": pair.key, "tls_client_ca": authority.cert}
    engine_tls = {
        "engine_tls_ca": authority.cert, "engine_tls_cert": pair.cert, "engine_tls_key": pair.key,
    }  # fmt: skip
    http_port = free_port()
    engine = start_engine(credentials=shown, log_level="debug", log_format="console", **tls)
    frontend = start_frontend(
        engine.address,
        credentials=shown,
        log_level="debug",
        log_format="json",
        http_port=http_port,
        api_keys_file=key_file,
        **engine_tls,
        **tls,
    )
    async with Stack(engine, frontend):
        async with grpc.aio.secure_channel(frontend.address, shown) as channel:
            said = await use_grpc(FrontendServiceStub(channel))
        context = ssl.create_default_context(cafile=authority.cert)
        context.load_cert_chain(pair.cert, pair.key)
        await use_raw_http2(frontend.address, context)
        async with httpx.AsyncClient(
            base_url=f"https://{LOOPBACK}:{http_port}", verify=context, timeout=30
        ) as client:
            texts = await use_http(client)
        texts += ["".join(output.text for output in said)]
        key_file.write_text(f'[keys.alice]\nkey = "{KEY}"\nkye = "{KEY}"\n')
        await until(lambda: "api_keys_not_reloaded" in frontend.log)
        await asyncio.to_thread(engine.kill)
        await until(lambda: "engine_lost" in frontend.log)
        logs = engine.log + frontend.log
    assert logs.count("request_finished") >= 3
    assert "call_refused" in logs
    assert not [line for line in logs.splitlines() if MARK in line]
    assert pair.key.read_text().splitlines()[1] not in logs
    for text in texts:
        assert len(text) > 40
        words = text.split()
        phrases = {" ".join(words[i : i + 4]) for i in range(len(words) - 3)}
        assert [phrase for phrase in phrases if phrase in logs] == []
    tokens = [token for output in said for token in output.token_ids]
    runs = {f"{a}, {b}, {c}" for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False)}
    assert [run for run in runs if run in logs] == []
