"""Several outputs of one prompt."""

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from typing import Self

from services.frontend.engine_client.messages import SamplingParams, Usage
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.request import Output

_SEED_BITS = 64


class Samples:
    """Merges the outputs of several generations. Iterate it to its end, or close it.

    It reads at most one output of each ahead. If one fails, all end.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        """Takes generations of one prompt, in the order of their indices."""
        self.prompt_token_ids = generations[0].prompt_token_ids
        self._generations = generations
        self._reads: dict[asyncio.Task[Output], int] = {}
        self._usages: list[Usage] = []
        self._has_begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        """Returns new output of one generation; the last one has the usage of all."""
        if not self._has_begun:
            self._has_begun = True
            for index in range(len(self._generations)):
                self._read(index)
        if not self._reads:
            raise StopAsyncIteration
        done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
        read = min(done, key=lambda task: self._reads[task])
        index = self._reads.pop(read)
        output = read.result()
        if output.usage is None:
            self._read(index)
        else:
            self._usages.append(output.usage)
        usage = None if self._reads else _joint_usage(self._usages)
        return dataclasses.replace(output, index=index, usage=usage)

    def cancel(self) -> None:
        """Ends all of them early; iteration continues to their last outputs."""
        for generation in self._generations:
            generation.cancel()

    def close(self) -> None:
        """Ends unfinished generations; nothing may be read afterwards."""
        for read in self._reads:
            read.cancel()
            if read.done() and not read.cancelled():
                read.exception()  # retrieve the error; the first one has ended the request
        for generation in self._generations:
            generation.close()

    def _read(self, index: int) -> None:
        self._reads[asyncio.ensure_future(anext(self._generations[index]))] = index


def sample_id(request_id: str, index: int) -> str:
    """Returns the id of one sample at the engine."""
    return request_id if index == 0 else f"{request_id}#{index}"


def sampling_of(sampling: SamplingParams | None, index: int) -> SamplingParams:
    """Returns the sampling of one sample, always with a seed, each following the previous one's."""
    own = SamplingParams()
    if sampling is not None:
        own.CopyFrom(sampling)
    if index:
        own.ClearField("prompt_logprobs")  # only the first sample reports them
    if own.HasField("seed"):
        own.seed = (own.seed + index) % 2**_SEED_BITS
    else:
        own.seed = random.getrandbits(_SEED_BITS)
    return own


def _joint_usage(usages: Sequence[Usage]) -> Usage:
    """Returns the usage of all outputs; their prompt counts once."""
    return Usage(
        prompt_tokens=max(usage.prompt_tokens for usage in usages),
        cached_tokens=min(usage.cached_tokens for usage in usages),
        output_tokens=sum(usage.output_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )
