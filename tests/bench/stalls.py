"""The longest stall that one message can cause: `python -m tests.bench.stalls`.

Both services as processes with the embedded model, --streams requests that stream all the while,
and beside them the messages of `worst_messages`, one after the other (--together N: N at a time),
each sent by a process of its own. Per message: the longest wait of each service's event loop, and
the most CPU that the loop's thread took within 20 ms and that wait (both as the upper bound of a
histogram's bucket); the longest gap between two outputs of a stream; streams that ended; the
answer. A wait without CPU is the machine's: run it where nothing else runs. "nothing" is no
message.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
import urllib.error
import urllib.request
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1 import engine_pb2
from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from tests.bench import machine
from tests.bench.worst_messages import Case, cases
from tests.support.processes import free_port, start_engine, start_frontend

REST_S = 0.5
TIMEOUT_S = 60.0
ANSWER_CHARACTERS = 60
NOTHING = Case("nothing", "nothing", "", bytes)


class Streams:
    """Requests that stream until the end, each followed by another."""

    def __init__(self, address: str, count: int) -> None:
        self._address = address
        self._count = count
        self._last_s = [0.0] * count
        self.longest_gap_s = 0.0
        self.num_failed = 0

    async def run(self) -> None:
        """Streams until cancelled."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = FrontendServiceStub(channel)
            async with asyncio.TaskGroup() as group:
                for index in range(self._count):
                    group.create_task(self._stream(stub, index))

    async def _stream(self, stub: Any, index: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=1800, ignore_eos=True)
        options = pb.GenerationOptions(sampling=sampling)
        while True:
            self._last_s[index] = time.perf_counter()
            try:
                async for _ in stub.Generate(pb.GenerateRequest(text=f"{index}", options=options)):
                    self._note(index)
            except grpc.aio.AioRpcError:
                self.num_failed += 1
                await asyncio.sleep(REST_S)

    def _note(self, index: int) -> None:
        now_s = time.perf_counter()
        self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_s[index])
        self._last_s[index] = now_s


class LagFigures:
    """Time that the services' event loops waited and worked since the last look."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._ports = ports
        self._before: dict[tuple[str, str, float], float] = {}

    def longest_s(self) -> dict[str, float]:
        """Returns, for wait and CPU of each service, the bound of the highest bucket with more."""
        longest: dict[str, float] = {}
        for service, port in self._ports.items():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
                page = response.read().decode()
            for family in text_string_to_metric_families(page):
                for figure in ("lag", "cpu"):
                    if not family.name.endswith(f"event_loop_{figure}_seconds"):
                        continue
                    below = 0.0
                    for sample in family.samples:
                        if not sample.name.endswith("_bucket"):
                            continue
                        bound = float(sample.labels["le"])
                        key = (service, figure, bound)
                        count, below = sample.value - below, sample.value
                        if count > self._before.get(key, 0):
                            longest[f"{service}_{figure}"] = bound
                        self._before[key] = count
        return longest


def _send(name: str, addresses: dict[str, str], pipe: Connection) -> None:
    """Makes a message, waits for the signal, and sends it; the child process."""
    [case] = [each for each in cases() if each.name == name]
    content = case.make()
    pipe.send(len(content))
    pipe.recv()
    start_s = time.perf_counter()
    try:
        answer = _answer(case, content, addresses)
    except Exception as error:  # noqa: BLE001  an answer like another
        answer = repr(error)
    pipe.send((answer[:ANSWER_CHARACTERS], time.perf_counter() - start_s))


def _answer(case: Case, content: bytes, addresses: dict[str, str]) -> str:
    if case.service == "http":
        request = urllib.request.Request(
            f"http://{addresses['http']}{case.target}",
            content,
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return f"{response.status}"
        except urllib.error.HTTPError as error:
            return f"{error.code} {json.loads(error.read())['error']['message']}"
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(addresses[case.service], options=options) as channel:
        try:
            if case.target.endswith("/Session"):
                hello = engine_pb2.FrontendMessage(hello=engine_pb2.FrontendHello(frontend_id="b"))
                messages = [hello.SerializeToString(), content]
                list(channel.stream_stream(case.target)(iter(messages), timeout=TIMEOUT_S))
            else:
                list(channel.unary_stream(case.target)(content, timeout=TIMEOUT_S))
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}"
    return "OK"


async def _measure(
    case: Case, addresses: dict[str, str], streams: Streams, figures: LagFigures, together: int
) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(together if case is not NOTHING else 0)]
    senders = [
        context.Process(target=_send, args=(case.name, addresses, theirs)) for _, theirs in pipes
    ]
    for sender in senders:
        sender.start()
    sizes = [await asyncio.to_thread(ours.recv) for ours, _ in pipes]
    await asyncio.sleep(REST_S)
    figures.longest_s()
    streams.longest_gap_s, streams.num_failed = 0.0, 0
    for ours, _ in pipes:
        ours.send("go")
    answers = [await asyncio.to_thread(ours.recv) for ours, _ in pipes]
    await asyncio.sleep(REST_S if answers else 4 * REST_S)
    for sender in senders:
        await asyncio.to_thread(sender.join)
    return {
        "case": case.name,
        "bytes": sizes[0] if sizes else 0,
        **await asyncio.to_thread(figures.longest_s),
        "gap_s": round(streams.longest_gap_s, 3),
        "ended": streams.num_failed,
        "took_s": round(max((took_s for _, took_s in answers), default=0.0), 2),
        "answer": answers[0][0] if answers else "",
    }


def _print(row: dict[str, Any]) -> None:
    def ms(name: str) -> str:
        return f"{1000 * row[name]:.0f}" if name in row else "-"

    columns = ("frontend_lag", "frontend_cpu", "engine_lag", "engine_cpu", "gap_s")
    figures = " ".join(f"{ms(name):>6}" for name in columns)
    print(f"{row['case']:40} {figures} {row['ended']:>3} {row['took_s']:>6}  {row['answer']}")


async def run(only: str, num_streams: int, together: int) -> list[dict[str, Any]]:
    """Measures every message whose name holds `only`."""
    http_port = free_port()
    ports = {"frontend": free_port(), "engine": free_port()}
    with (
        start_engine(metrics_port=ports["engine"]) as engine,
        start_frontend(
            engine.address, http_port=http_port, metrics_port=ports["frontend"]
        ) as frontend,
    ):
        addresses = {
            "http": f"127.0.0.1:{http_port}",
            "frontend": frontend.address,
            "engine": engine.address,
        }
        streams, figures = Streams(frontend.address, num_streams), LagFigures(ports)
        streaming = asyncio.create_task(streams.run())
        await asyncio.sleep(4 * REST_S)
        print(f"{'ms, at most':40} {'f lag':>6} {'f cpu':>6} {'e lag':>6} {'e cpu':>6} {'gap':>6}")
        rows = []
        for case in (NOTHING, *(each for each in cases() if only in each.name), NOTHING):
            rows.append(await _measure(case, addresses, streams, figures, together))
            _print(rows[-1])
        streaming.cancel()
    return rows


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="messages whose names hold this")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--together", type=int, default=1, help="equal messages at a time")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    rows = asyncio.run(run(arguments.only, arguments.streams, arguments.together))
    if arguments.json:
        facts = {**machine.machine(), **machine.versions(), "commit": machine.commit()}
        arguments.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
