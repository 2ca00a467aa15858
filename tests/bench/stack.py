"""Tokens per second of the whole stack against transformers' generate, in one run.

Same checkpoint, same prompts, greedy, fp32, one thread each. transformers answers one request after
the other, as a plain server around it would, and also as one static batch of 32 padded prompts, the
best it can do when all requests happen to arrive together. The stack answers text over gRPC.

    python -m tests.bench.stack [--json out.json]
"""

import argparse
import asyncio
import json
import platform
import statistics
import time
from pathlib import Path

import grpc
import torch

from protos.common.v1 import sampling_pb2
from protos.frontend.v1 import frontend_pb2, frontend_pb2_grpc
from services.engine.config.checkpoint import TINY_CHECKPOINT
from tests.support.processes import start_engine, start_frontend
from tests.support.transformers_reference import TransformersReference
from tests.support.varied_prompts import NAMES

MAX_TOKENS = 64
CONCURRENCY = 32


def story_prompts(count: int) -> list[str]:
    """Returns prompts of about equal length."""
    return [f"Tell me a story about {NAMES[i % len(NAMES)]} and a fox." for i in range(count)]


class Stack:
    """The frontend of a running stack."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def _one(self, stub: frontend_pb2_grpc.FrontendServiceStub, prompt: str) -> int:
        sampling = sampling_pb2.SamplingParams(
            temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True
        )
        request = frontend_pb2.ChatRequest(
            options=frontend_pb2.GenerationOptions(sampling=sampling),
            messages=[frontend_pb2.ChatMessage(role="user", content=prompt)],
        )
        tokens = 0
        async for response in stub.Chat(request):
            tokens = response.output.usage.output_tokens or tokens
        return tokens

    async def tokens_per_s(self, prompts: list[str], concurrency: int) -> float:
        """Answers all prompts, `concurrency` at a time."""
        gate = asyncio.Semaphore(concurrency)
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = frontend_pb2_grpc.FrontendServiceStub(channel)

            async def gated(prompt: str) -> int:
                async with gate:
                    return await self._one(stub, prompt)

            start = time.perf_counter()
            counts = await asyncio.gather(*map(gated, prompts))
            return sum(counts) / (time.perf_counter() - start)


class Peer:
    """transformers, in this process."""

    def __init__(self) -> None:
        self._reference = TransformersReference(TINY_CHECKPOINT)
        self._reference.tokenizer.padding_side = "left"

    @torch.inference_mode()
    def tokens_per_s(self, prompts: list[str], batch: int) -> float:
        """Answers all prompts, `batch` at a time in one padded call."""
        tokenizer, model = self._reference.tokenizer, self._reference.model
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            for chat in chats
        ]
        tokens = 0
        start = time.perf_counter()
        for i in range(0, len(texts), batch):
            inputs = tokenizer(texts[i : i + batch], return_tensors="pt", padding=True)
            inputs.pop("token_type_ids", None)
            output = model.generate(
                **inputs, max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS, do_sample=False
            )
            tokens += output.shape[0] * (output.shape[1] - inputs["input_ids"].shape[1])
        return tokens / (time.perf_counter() - start)


def measure(repeats: int) -> dict[str, list[float]]:
    """Takes every figure in turn, `repeats` times, so that drift hits all alike."""
    peer = Peer()
    figures: dict[str, list[float]] = {}
    with start_engine() as engine, start_frontend(engine.address) as frontend:
        stack = Stack(frontend.address)
        asyncio.run(stack.tokens_per_s(story_prompts(4), 2))
        peer.tokens_per_s(story_prompts(2), 1)
        for _ in range(repeats):
            one, many = story_prompts(4), story_prompts(2 * CONCURRENCY)
            run = {
                "stack, 1 request": asyncio.run(stack.tokens_per_s(one, 1)),
                "transformers, 1 request": peer.tokens_per_s(one, 1),
                "stack, 32 concurrent": asyncio.run(stack.tokens_per_s(many, CONCURRENCY)),
                "transformers, 32 one by one": peer.tokens_per_s(many[:CONCURRENCY], 1),
                "transformers, 32 in one batch": peer.tokens_per_s(many, CONCURRENCY),
            }
            for name, value in run.items():
                figures.setdefault(name, []).append(value)
    return figures


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    figures = measure(arguments.repeats)
    print(f"{'tokens/s':32} {'median':>9} {'min':>9} {'max':>9}")
    for name, values in figures.items():
        median = statistics.median(values)
        print(f"{name:32} {median:9.0f} {min(values):9.0f} {max(values):9.0f}")
    if arguments.json:
        facts = {"torch": torch.__version__, "python": platform.python_version()}
        arguments.json.write_text(json.dumps({**facts, "tokens_per_s": figures}, indent=2))


if __name__ == "__main__":
    main()
