"""Several outputs of one request."""

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from typing import Self

from services.frontend.engine_client.messages import SamplingParams, Usage
from services.frontend.pipeline.generation import Generation
from services.frontend.pipeline.request import Output

_SEED_BITS = 64
_FIRST_VERSION = "first_weights_version"


class Samples:
    """Merges the outputs of several generations. Iterate it to its end, or close it.

    It reads at most one output of each ahead. If one fails, all end.
    """

    def __init__(self, generations: Sequence[Generation], *, samples_per_prompt: int) -> None:
        """Takes generations in the order of their indices, those of one prompt together."""
        self._generations = generations
        self._samples_per_prompt = samples_per_prompt
        self._reads: dict[asyncio.Task[Output], int] = {}
        self._usages: dict[int, Usage] = {}
        self._has_begun = False

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The token ids of each prompt."""
        first = self._generations[:: self._samples_per_prompt]
        return [generation.prompt_token_ids for generation in first]

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
            self._usages[index] = output.usage
        usage = None if self._reads else self._joint_usage()
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

    def _joint_usage(self) -> Usage:
        """Returns the usage of all outputs; a prompt counts once."""
        usages = [self._usages[index] for index in range(len(self._generations))]
        size = self._samples_per_prompt
        prompts = [usages[start : start + size] for start in range(0, len(usages), size)]
        versions = [
            *(each.first_weights_version for each in usages if each.HasField(_FIRST_VERSION)),
            *(each.weights_version for each in usages),
        ]
        return Usage(
            weights_version=versions[-1],
            first_weights_version=versions[0] if versions[0] != versions[-1] else None,
            prompt_tokens=sum(max(each.prompt_tokens for each in of) for of in prompts),
            cached_tokens=sum(min(each.cached_tokens for each in of) for of in prompts),
            output_tokens=sum(each.output_tokens for each in usages),
            reasoning_tokens=sum(each.reasoning_tokens for each in usages),
        )

    def _read(self, index: int) -> None:
        self._reads[asyncio.ensure_future(anext(self._generations[index]))] = index


async def wait_until_admitted(generations: Sequence[Generation]) -> None:
    """Waits until engines admit all generations, which ask for turns at a shared card at once.

    Raises:
        FrontendError, EngineFaultError: no engine admits one of them.
    """
    if len(generations) == 1:
        await generations[0].admitted()
    else:
        await asyncio.gather(*(each.admitted() for each in generations))


def sample_id(request_id: str, index: int) -> str:
    """Returns the engine's id of the request's output with this index."""
    return request_id if index == 0 else f"{request_id}#{index}"


def sampling_of(sampling: SamplingParams | None, index: int) -> SamplingParams:
    """Returns the sampling of a prompt's sample with this index, always with a seed.

    The seed of each sample follows the previous one's.
    """
    own = SamplingParams()
    if sampling is not None:
        own.CopyFrom(sampling)
    if index:
        own.ClearField("prompt_logprobs")  # only the first sample of a prompt reports them
    if own.HasField("seed"):
        own.seed = (own.seed + index) % 2**_SEED_BITS
    else:
        own.seed = random.getrandbits(_SEED_BITS)
    return own
