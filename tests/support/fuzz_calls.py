"""Sends hostile payloads to every method of a service and counts the outcomes."""

import random
import threading
from collections import Counter
from dataclasses import dataclass, field

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1 import engine_pb2
from protos.frontend.v1 import frontend_pb2 as pb
from protos.openengine.v1 import openengine_pb2
from tests.support.hostile_messages import HostileMessages, is_taken_whole

HANG_S = 60.0
"""A call that takes longer hangs; far above what a busy machine needs."""
MAX_RESPONSES = 50
GOOD_CODES = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.CANCELLED,  # by ourselves, having seen enough
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,  # to stop what does not run
    }
)
GOOD_FAILURES = frozenset(code.value[0] for code in GOOD_CODES) | {4}
"""Codes of one request's failure on a stream; its own time limit may have passed."""

_SAMPLING = SamplingParams(max_tokens=2, temperature=0)
_OPTIONS = pb.GenerationOptions(sampling=_SAMPLING)
_CHAT = [pb.ChatMessage(role="user", content="Hi")]
_PROMPT = (1).to_bytes(4, "little") * 3
SEEDS: dict[type[Message], list[Message]] = {
    engine_pb2.GenerateRequest: [
        engine_pb2.GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=_SAMPLING)
    ],
    engine_pb2.FrontendMessage: [
        engine_pb2.FrontendMessage(
            submit=engine_pb2.Submit(
                handle=handle, request_id="r", prompt_token_ids=_PROMPT, sampling=_SAMPLING
            )
        )
        for handle in (1, 2)
    ]
    + [
        engine_pb2.FrontendMessage(abort=engine_pb2.Abort(handles=[1])),
        engine_pb2.FrontendMessage(credit=engine_pb2.Credit(steps_read=1)),
    ],
    openengine_pb2.GenerateRequest: [
        openengine_pb2.GenerateRequest(
            request_id="r",
            token_ids={"ids": [1, 2, 3]},
            sampling={"temperature": 0},
            stopping={"max_tokens": 2},
        )
    ],
    pb.GenerateRequest: [pb.GenerateRequest(text="Once", options=_OPTIONS)],
    pb.ChatRequest: [pb.ChatRequest(messages=_CHAT, options=_OPTIONS)],
    pb.SessionRequest: [
        pb.SessionRequest(handle=1, generate=pb.GenerateRequest(text="a", options=_OPTIONS)),
        pb.SessionRequest(handle=2, chat=pb.ChatRequest(messages=_CHAT, options=_OPTIONS)),
        pb.SessionRequest(handle=3, prompt_part=pb.PromptPart(text="a", options=_OPTIONS)),
        pb.SessionRequest(handle=3, prompt_part=pb.PromptPart(text="b", last=True)),
        pb.SessionRequest(handle=1, cancel=pb.Cancel()),
    ],
    pb.TokenizeRequest: [
        pb.TokenizeRequest(text="Once"),
        pb.TokenizeRequest(conversation=pb.Conversation(messages=_CHAT)),
    ],
    pb.DetokenizeRequest: [pb.DetokenizeRequest(token_ids=[1, 2, 3])],
}
HELLO = engine_pb2.FrontendMessage(hello=engine_pb2.FrontendHello(frontend_id="fuzz"))
UNENDING_S = {"WatchSteps": 0.02, "SubscribeKvEvents": 0.02, "Watch": 0.02, "Session": 0.5}
"""How long calls are watched that go on as long as the caller wants."""
_ENDING_ALL = "Drain"


@dataclass
class Outcome:
    """Counts of messages sent, and of their outcomes."""

    num_messages: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    """Calls that ended as none may, with what was sent."""

    def add(self, what: str, code: grpc.StatusCode, details: str | None, sent: list[bytes]) -> None:
        """Notes how a call ended."""
        self.codes[f"{what} {code.name}"] += 1
        if code not in GOOD_CODES:
            shown = [data[:200].hex() for data in sent]
            self.bad.append(f"{what}: {code.name} {details} after {shown}")


@dataclass(frozen=True)
class FuzzedService:
    """One service of one process.

    Calls block: grpc.aio hides how a stream has ended from a caller that writes to it at that
    moment.
    """

    channel: grpc.Channel
    descriptor: ServiceDescriptor

    def call_any(self, rng: random.Random, outcome: Outcome) -> None:
        """Calls one of the methods with a payload that only a fuzzer sends."""
        method = rng.choice(self.descriptor.methods)
        request_class = message_factory.GetMessageClass(method.input_type)
        hostile = HostileMessages(rng)
        seeds = SEEDS.get(request_class, [request_class()])
        count = rng.randint(1, 12) if method.client_streaming else 1
        sent = [hostile.payload(rng.choice(seeds)) for _ in range(count)]
        if count > 1 and rng.random() < 0.7:  # one that cannot be parsed would end the stream
            sent = [hostile.wild(rng.choice(seeds)).SerializeToString() for _ in range(count)]
        if request_class is engine_pb2.FrontendMessage and rng.random() < 0.95:
            sent.insert(0, HELLO.SerializeToString())
        self.call(method.name, sent, outcome)

    def call(self, name: str, sent: list[bytes], outcome: Outcome) -> None:
        """Calls one method with these payloads and notes how that ended."""
        method = self.descriptor.methods_by_name[name]
        if name == _ENDING_ALL and is_taken_whole(
            sent[0], message_factory.GetMessageClass(method.input_type)
        ):
            return
        path = f"/{self.descriptor.full_name}/{name}"
        outcome.num_messages += len(sent)
        if not method.server_streaming:
            call = self.channel.unary_unary(path).future(sent[0], timeout=HANG_S)
        elif method.client_streaming:
            call = self.channel.stream_stream(path)(iter(sent), timeout=HANG_S)
        else:
            call = self.channel.unary_stream(path)(sent[0], timeout=HANG_S)
        if method.server_streaming:
            limit_s = UNENDING_S.get(name, HANG_S)
            response_class = message_factory.GetMessageClass(method.output_type)
            _read_some(call, limit_s, response_class, outcome, sent)
        outcome.add(name, call.code(), call.details(), sent)


def _read_some(call, limit_s: float, response_class, outcome: Outcome, sent: list[bytes]) -> None:
    """Reads a few responses and leaves, after `limit_s` at the latest."""
    leaving = threading.Timer(limit_s, call.cancel)
    leaving.start()
    try:
        for _, data in zip(range(MAX_RESPONSES), call, strict=False):
            _check_failures(response_class.FromString(data), outcome, sent)
        call.cancel()
    except grpc.RpcError:
        pass
    finally:
        leaving.cancel()


def _check_failures(response: Message, outcome: Outcome, sent: list[bytes]) -> None:
    """Notes the failure of one request on a stream if it is one that none may have."""
    match response:
        case pb.SessionResponse():
            failures = [response.failure]
        case engine_pb2.EngineMessage():
            failures = [response.rejected.failure, *(f.failure for f in response.step.finished)]
        case _:
            failures = []
    for failure in failures:
        outcome.codes[f"in a session {failure.code}"] += 1
        if failure.code not in GOOD_FAILURES:
            shown = [data[:200].hex() for data in sent]
            outcome.bad.append(f"in a session: {failure.code} {failure.message} after {shown}")
