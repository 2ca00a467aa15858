"""Requests for tests, with every field that does not matter filled in."""

import itertools
import time
from collections.abc import Iterable, Sequence

from services.engine.adapter import Adapter
from services.engine.prompt_image import PromptImage
from services.engine.request import OutputSink, Request, RequestOutput, SamplingParams

_numbers = itertools.count(1)


class RecordingSink(OutputSink):
    """Keeps all outputs; `num_flushes` counts the steps that brought some."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.num_flushes = 0

    def put(self, output: RequestOutput) -> None:
        self.outputs.append(output)

    def flush(self) -> None:
        self.num_flushes += 1

    @property
    def token_ids(self) -> list[int]:
        """All tokens put so far."""
        return [token_id for output in self.outputs for token_id in output.token_ids]


def make_sampling(
    *, max_tokens: int = 16, seed: int = 0, end_token_ids: Iterable[int] = (), **fields
) -> SamplingParams:
    """Returns greedy sampling without an end token, unless told otherwise."""
    return SamplingParams(
        **{"temperature": 0.0} | fields,
        max_tokens=max_tokens,
        seed=seed,
        end_token_ids=frozenset(end_token_ids),
    )


def make_request(
    prompt: Sequence[int] | int = 8,
    *,
    resumed_token_ids: Sequence[int] = (),
    request_id: str | None = None,
    sampling: SamplingParams | None = None,
    priority: int = 0,
    cache_salt: str = "",
    arrival_s: float | None = None,
    deadline_s: float | None = None,
    images: Sequence[PromptImage] = (),
    adapter: Adapter | None = None,
    **sampling_fields,
) -> Request:
    """Returns a request with a recording sink.

    A prompt given as a number has that many tokens, unlike those of any other request.
    """
    number = next(_numbers)
    if isinstance(prompt, int):
        prompt = [(number * 7919 + i) % 1000 for i in range(prompt)]
    return Request(
        request_id=request_id or f"request-{number}",
        handle=number,
        prompt_token_ids=list(prompt),
        adapter=adapter,
        resumed_token_ids=list(resumed_token_ids),
        sampling=sampling or make_sampling(**sampling_fields),
        sink=RecordingSink(),
        priority=priority,
        cache_salt=cache_salt,
        arrival_s=time.monotonic() if arrival_s is None else arrival_s,
        deadline_s=deadline_s,
        images=tuple(images),
    )
