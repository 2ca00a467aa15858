"""The messages that cost a service most, each near 16 MiB or near a limit."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protos.common.v1.sampling_pb2 import SamplingParams, StructuredOutput, TextChoice
from protos.engine.v1 import engine_pb2
from protos.frontend.v1 import frontend_pb2 as pb

MAX_BYTES = 15 * 2**20
_FRONTEND = "/octavo.frontend.v1.FrontendService/"
_ENGINE = "/octavo.engine.v1.EngineService/"


@dataclass(frozen=True, slots=True)
class Case:
    """One message. `target` is a path of HTTP or a method of gRPC, `service` whose it is."""

    name: str
    service: str
    target: str
    make: Callable[[], bytes]


def cases() -> Iterator[Case]:
    """Goes through the corpus."""
    for name, path, make in _bodies():
        yield Case(f"HTTP {name}", "http", f"/v1/{path}", make)
    for name, method, make in _frontend_messages():
        yield Case(f"frontend {method} {name}", "frontend", _FRONTEND + method, make)
    for name, method, make in _engine_messages():
        yield Case(f"engine {method} {name}", "engine", _ENGINE + method, make)


def _filled(before: bytes, part: bytes, after: bytes, num_bytes: int = MAX_BYTES) -> bytes:
    return before + part * ((num_bytes - len(before) - len(after)) // len(part)) + after


def _numbered(before: bytes, part: bytes, after: bytes, count: int) -> bytes:
    return before + b",".join(part % index for index in range(count)) + after


def _bodies() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    prompt = b'{"model":"tiny","prompt":'
    chat = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],'
    tool = chat + b'"tools":[{"type":"function","function":{"name":"a","parameters":{"x":['
    tool_end = b"{}]}}}]}"
    for part in (b"{},", b"[],", b'{"a":1},', b"1,", b'"",', b"9" * 4000 + b",", b"[[[[]]]],"):
        yield (
            f"tools of {part[:12].decode()}",
            "chat/completions",
            lambda part=part: _filled(tool, part, tool_end),
        )
    yield "tokens", "completions", lambda: _filled(prompt + b"[", b"1,", b"1]}")
    yield "tokens, 1 Mi", "completions", lambda: prompt + b"[" + b"1," * (2**20 - 1) + b"1]}"
    yield "wrong tokens", "completions", lambda: _filled(prompt + b"[", b'"",', b"1]}")
    yield "text", "completions", lambda: _filled(prompt + b'"', b"a ", b'"}')
    yield "text, 1 MiB", "completions", lambda: _filled(prompt + b'"', b"a ", b'"}', 2**20)
    yield (
        "text, 1 MiB, no spaces",
        "completions",
        lambda: _filled(prompt + b'"', b"a", b'"}', 2**20),
    )
    yield "text of escapes", "completions", lambda: _filled(prompt + b'"', b"\\u00e9", b'"}')
    yield "blanks", "completions", lambda: _filled(prompt + b'"a"', b" ", b"}")
    yield "no JSON", "completions", lambda: b"{" * MAX_BYTES
    yield (
        "biases",
        "completions",
        lambda: _numbered(prompt + b'"a","logit_bias":{', b'"%d":1', b"}}", 1_200_000),
    )
    yield (
        "wrong biases, 4000",
        "completions",
        lambda: _numbered(prompt + b'"a","logit_bias":{', b'"x%d":1', b"}}", 2000),
    )
    yield (
        "unknown fields",
        "completions",
        lambda: _numbered(prompt + b'"a",', b'"k%d":1', b"}", 1_300_000),
    )
    yield (
        "unknown fields, 131000",
        "completions",
        lambda: _numbered(prompt + b'"a","stream_options":{', b'"k%d":1', b"}}", 131_000),
    )
    yield (
        "choices",
        "completions",
        lambda: _filled(prompt + b'"a","structured_outputs":{"choice":[', b"1,", b'""]}}'),
    )
    yield (
        "schema",
        "completions",
        lambda: _filled(prompt + b'"a","structured_outputs":{"json":{"x":[', b"{},", b"{}]}}}"),
    )
    parts = [{"type": "text", "text": "x"}] * 120
    message = {"role": "user", "content": parts}
    yield "4096 x 120 parts", "chat/completions", lambda: _json_chat([message] * 4096)
    yield (
        "4096 messages",
        "chat/completions",
        lambda: _json_chat([{"role": "user", "content": "x" * 200}] * 4096),
    )
    call = {"id": "", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    calling = {"role": "assistant", "tool_calls": [call] * 100}
    yield "100 x 100 tool calls", "chat/completions", lambda: _json_chat([calling] * 100)
    deep = {
        "id": "",
        "type": "function",
        "function": {"name": "a", "arguments": "[" + "{}," * 10**6},
    }
    yield (
        "arguments of {},",
        "chat/completions",
        lambda: _json_chat([{"role": "assistant", "tool_calls": [deep]}]),
    )
    yield "model of 15 MiB", "completions", lambda: _filled(b'{"model":"', b"a", b'","prompt":"a"}')


def _json_chat(messages: list[dict[str, object]]) -> bytes:
    return json.dumps({"model": "tiny", "messages": messages}, separators=(",", ":")).encode()


def _frontend_messages() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    def calls(num_messages: int, num_calls: int, arguments: str = "{}") -> bytes:
        call = pb.ToolCall(name="a", arguments=arguments)
        message = pb.ChatMessage(role="assistant", tool_calls=[call] * num_calls)
        return pb.ChatRequest(messages=[message] * num_messages).SerializeToString()

    def sampling(**fields: object) -> bytes:
        options = pb.GenerationOptions(sampling=SamplingParams(**fields))
        return pb.GenerateRequest(text="a", options=options).SerializeToString()

    empty_calls = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall()] * 1800)
    yield (
        "2000 x 1800 empty calls",
        "Chat",
        lambda: pb.ChatRequest(messages=[empty_calls] * 2000).SerializeToString(),
    )
    yield "2000 x 1000 calls", "Chat", lambda: calls(1000, 1000)
    yield "65 x 100 calls", "Chat", lambda: calls(65, 100)
    yield "arguments of {},", "Chat", lambda: calls(1, 1, '{"a":[' + "{}," * 10**6 + "{}]}")
    yield "arguments of 65000 {}", "Chat", lambda: calls(1, 1, '{"a":[' + "{}," * 32_000 + "{}]}")
    yield (
        "4096 messages",
        "Chat",
        lambda: pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content="x" * 200)] * 4096
        ).SerializeToString(),
    )
    yield "empty messages", "Chat", lambda: _filled(b"", b"\x12\x00", b"")
    yield "unknown fields", "Chat", lambda: _filled(b"", b"\x78\x00", b"")
    yield "unknown groups", "Chat", lambda: _filled(b"", b"\x7b\x7c", b"")
    yield (
        "tokens",
        "Generate",
        lambda: pb.GenerateRequest(tokens=pb.TokenIds(ids=[1] * MAX_BYTES)).SerializeToString(),
    )
    yield (
        "tokens, 1 Mi",
        "Generate",
        lambda: pb.GenerateRequest(tokens=pb.TokenIds(ids=[1000] * 2**20)).SerializeToString(),
    )
    yield "text", "Generate", lambda: pb.GenerateRequest(text="é" * 7_500_000).SerializeToString()
    yield (
        "text, 1 MiB",
        "Generate",
        lambda: pb.GenerateRequest(text="é" * 2**19).SerializeToString(),
    )
    yield "biases", "Generate", lambda: sampling(logit_bias=dict.fromkeys(range(10**6), 1.0))
    yield "6000 biases", "Generate", lambda: sampling(logit_bias=dict.fromkeys(range(6000), 1.0))
    yield (
        "choices",
        "Generate",
        lambda: sampling(
            structured_output=StructuredOutput(choice=TextChoice(texts=["a"] * 10**6))
        ),
    )
    yield "stop token ids", "Generate", lambda: sampling(stop_token_ids=[1] * MAX_BYTES)
    yield (
        "1 Mi ids",
        "Detokenize",
        lambda: pb.DetokenizeRequest(token_ids=[1000] * 2**20).SerializeToString(),
    )
    yield (
        "15 Mi ids",
        "Detokenize",
        lambda: pb.DetokenizeRequest(token_ids=[1] * MAX_BYTES).SerializeToString(),
    )
    yield "1 MiB", "Tokenize", lambda: pb.TokenizeRequest(text="z" * 2**20).SerializeToString()


def _engine_messages() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    def generate(**fields: object) -> bytes:
        sampling = SamplingParams(**fields)
        return engine_pb2.GenerateRequest(
            prompt_token_ids=[1], sampling=sampling
        ).SerializeToString()

    yield (
        "tokens",
        "Generate",
        lambda: engine_pb2.GenerateRequest(prompt_token_ids=[1] * MAX_BYTES).SerializeToString(),
    )
    yield "biases", "Generate", lambda: generate(logit_bias=dict.fromkeys(range(10**6), 1.0))
    yield "6000 biases", "Generate", lambda: generate(logit_bias=dict.fromkeys(range(6000), 1.0))
    yield "stop token ids", "Generate", lambda: generate(stop_token_ids=[1] * MAX_BYTES)
    yield (
        "choices",
        "Generate",
        lambda: generate(
            structured_output=StructuredOutput(choice=TextChoice(texts=["a"] * 10**6))
        ),
    )
    yield (
        "grammar of 15 MiB",
        "Generate",
        lambda: generate(structured_output=StructuredOutput(regex="a" * MAX_BYTES)),
    )
    yield (
        "schema of 60 KiB",
        "Generate",
        lambda: generate(
            structured_output=StructuredOutput(json_schema='{"enum":[' + "1," * 30_000 + "1]}")
        ),
    )
    yield "unknown fields", "Generate", lambda: _filled(b"", b"\x78\x00", b"")
    yield (
        "aborts",
        "Session",
        lambda: engine_pb2.FrontendMessage(
            abort=engine_pb2.Abort(handles=[1] * MAX_BYTES)
        ).SerializeToString(),
    )
