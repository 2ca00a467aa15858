"""Images through a whole frontend, beside requests that decode: for tests.bench.image_reading.

The frontend is the real service in a process of its own; the engine is a stand-in that takes
patches and sends a token a step.
"""

import asyncio
import io
import itertools
import time
from dataclasses import dataclass, field

import grpc
from PIL import Image

from protos.frontend.v1 import frontend_pb2 as pb
from protos.frontend.v1.frontend_pb2_grpc import FrontendServiceStub
from services.transport.grpc_options import channel_options
from tests.support.image_settings import settings_text
from tests.support.processes import start_frontend
from tests.support.vision import vision_engine

STEP_S = 0.02
WARM_UP_IMAGES = 8
_MEMORY_BYTES = 2**30


@dataclass
class StreamTimes:
    """When messages of streams of text came."""

    gaps_s: list[float] = field(default_factory=list)

    async def read(self, stub: FrontendServiceStub, max_tokens: int) -> None:
        """Reads a stream of text to its end."""
        options = pb.GenerationOptions(sampling={"max_tokens": max_tokens})
        last = None
        async for _ in stub.Chat(_chat([pb.ContentPart(text="hi")], options)):
            now = time.perf_counter()
            if last is not None:
                self.gaps_s.append(now - last)
            last = now


def distinct_files(image: Image.Image, kind: str, count: int) -> list[bytes]:
    """Returns files of pictures that differ in a pixel."""
    files = []
    for number in range(count):
        image.putpixel((0, 0), (number % 256, number // 256, 0))
        file = io.BytesIO()
        image.save(file, kind)
        files.append(file.getvalue())
    return files


async def served(files: list[bytes], num_streams: int, at_once: int) -> tuple[float, float]:
    """Returns images a second, and the longest gap of streams in seconds.

    Args:
        files: distinct images, each the only one of a request.
        num_streams: requests of text that decode all the while.
        at_once: images in flight.
    """
    engine = vision_engine(
        "a cat " * 2000, kind="qwen_vl", step_s=STEP_S, max_model_len=2**20,
        settings=settings_text("qwen_vl", max_pixels=16384 * 28 * 28),
        max_image_bytes=_MEMORY_BYTES,
    )  # fmt: skip
    limits = {"max_image_memory_bytes": _MEMORY_BYTES}
    async with engine, start_frontend(engine.address, **limits) as frontend:
        options = channel_options(64 * 2**20)
        async with grpc.aio.insecure_channel(frontend.address, options=options) as channel:
            stub = FrontendServiceStub(channel)
            await _send(stub, files[:WARM_UP_IMAGES], at_once)
            times = StreamTimes()
            streams = [asyncio.create_task(times.read(stub, 10**5)) for _ in range(num_streams)]
            await asyncio.sleep(1)
            times.gaps_s.clear()
            started = time.perf_counter()
            await _send(stub, files[WARM_UP_IMAGES:], at_once)
            elapsed_s = time.perf_counter() - started
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    return (len(files) - WARM_UP_IMAGES) / elapsed_s, max(times.gaps_s, default=0.0)


async def _send(stub: FrontendServiceStub, files: list[bytes], at_once: int) -> None:
    """Sends each file in a request of one token."""
    left = iter(files)
    options = pb.GenerationOptions(sampling={"max_tokens": 1})

    async def send() -> None:
        for file in left:
            async for _ in stub.Chat(_chat([pb.ContentPart(image=file)], options)):
                pass

    await asyncio.gather(*itertools.starmap(send, [()] * at_once))


def _chat(parts: list[pb.ContentPart], options: pb.GenerationOptions) -> pb.ChatRequest:
    return pb.ChatRequest(messages=[pb.ChatMessage(role="user", parts=parts)], options=options)
