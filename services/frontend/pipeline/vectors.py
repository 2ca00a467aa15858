"""Runs requests for the vectors of texts, and for scores of queries and documents."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from services.frontend.access.caller import Lease
from services.frontend.engine_client.messages import (
    STOP,
    EngineRequest,
    Pooling,
    PoolingTask,
    TokenBatch,
    Usage,
    pack_uint32,
)
from services.frontend.engine_client.pool import EnginePool
from services.frontend.engine_client.token_stream import TokenStream
from services.frontend.errors import (
    EngineFaultError,
    EngineUnavailableError,
    InvalidRequestError,
    OverloadedError,
)
from services.frontend.pipeline.input_encoder import InputEncoder
from services.frontend.pipeline.prompts import Prompts
from services.frontend.pipeline.request import (
    MAX_CACHE_SALT_CHARACTERS,
    MAX_REQUEST_ID_CHARACTERS,
    Output,
    check_vocabulary,
)
from services.frontend.pipeline.request_log import RequestRecord
from services.frontend.pipeline.samples import sample_id
from services.frontend.pipeline.served_model import ServedModel

MAX_INPUTS = 2048
"""Inputs of one request, as in OpenAI's API."""
MAX_TOKENS = 300_000
"""Tokens of all inputs of a request, as in OpenAI's API."""
MAX_NUMBERS = 2**22
"""Elements of all vectors of a request: 16 MiB, or about 90 MB as JSON."""
MAX_CHARACTERS = 2**24
"""Characters of all texts to encode; a query counts with each of its documents."""
MAX_IN_FLIGHT = 64
"""Inputs of a request that engines have at a time, so that it leaves room in their queues."""
EMBED, SCORE = PoolingTask.POOLING_TASK_EMBED, PoolingTask.POOLING_TASK_SCORE
_TASKS = {EMBED: "embed", SCORE: "score"}

Matrix: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOptions:
    """A caller's options of a request for vectors or scores."""

    model: str = ""
    request_id: str
    priority: int = 0
    cache_salt: str = ""
    truncate_tokens: int | None = None
    """Most tokens of an input, which keeps its first ones; None refuses one that is too long."""
    dimensions: int | None = None
    """Leading elements of each vector to return; None for all."""
    prompt_name: str | None = None
    """The model's prompt to put before texts; None for its default one."""
    instruction: str | None = None
    """The instruction of a score; None for the model's."""
    max_document_tokens: int | None = None
    """Most tokens of each document to score, which keeps its first ones; None for all."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors in the order of the inputs, [n, size], and what they cost."""

    matrix: Matrix
    usage: Usage


class VectorRequests:
    """Encodes inputs, submits them to the engines and collects their vectors."""

    def __init__(
        self, engine: EnginePool, prompts: Prompts, model_named: Callable[[str], ServedModel]
    ) -> None:
        """Takes the pipeline's parts."""
        self._engine = engine
        self._prompts = prompts
        self._model_named = model_named

    async def embed(
        self,
        inputs: Sequence[str | list[int]],
        options: VectorOptions,
        *,
        record: RequestRecord,
        lease: Lease,
        timeout_s: float | None = None,
    ) -> Vectors:
        """Returns the vectors of texts and of lists of token ids, which are used as they are.

        Raises:
            FrontendError, EngineFaultError: the request is refused or failed.
        """
        run = self._begin(options, EMBED, len(inputs), record, lease, timeout_s)
        pooling = run.pooling
        size = pooling.size if options.dimensions is None else options.dimensions
        if not 1 <= size <= pooling.size:
            raise InvalidRequestError(
                f"dimensions is {size}; the model's vectors have {pooling.size}", field="dimensions"
            )
        if len(inputs) * size > MAX_NUMBERS:
            raise InvalidRequestError(
                f"{len(inputs)} vectors of {size} elements are over {MAX_NUMBERS} elements, the"
                " limit of a request",
                field="input",
            )
        before = _prompt_named(pooling, options.prompt_name)
        _check_texts([before + each for each in inputs if isinstance(each, str)])
        encoder = InputEncoder(self._prompts, run.model, lease, limit=run.limit)
        for each in inputs:
            if isinstance(each, list):
                run.add(each if run.limit is None else each[: run.limit])
            else:
                run.add(await encoder.text(before + each) if each else [])
        result = await self._vectors(run)
        return Vectors(resized(result.matrix, size, pooling), result.usage)

    async def score(
        self,
        pairs: Sequence[tuple[str, str]],
        options: VectorOptions,
        *,
        record: RequestRecord,
        lease: Lease,
        timeout_s: float | None = None,
    ) -> Vectors:
        """Returns how well each pair's document answers its query, [n, 1].

        Raises:
            FrontendError, EngineFaultError: the request is refused or failed.
        """
        run = self._begin(options, SCORE, len(pairs), record, lease, timeout_s)
        _check_texts([text for pair in pairs for text in (*pair, options.instruction or "")])
        encoder = InputEncoder(self._prompts, run.model, lease, limit=run.limit)
        async for token_ids in encoder.pairs(
            pairs,
            instruction=options.instruction,
            max_document_tokens=options.max_document_tokens,
        ):
            run.add(token_ids)
        return await self._vectors(run)

    def _begin(
        self,
        options: VectorOptions,
        task: PoolingTask,
        num_inputs: int,
        record: RequestRecord,
        lease: Lease,
        timeout_s: float | None,
    ) -> "_Run":
        """Checks a request before anything is encoded."""
        model = self._model_named(options.model)
        served = model.info.pooling.task if model.info.HasField("pooling") else None
        if served != task:
            does = "generate" if served is None else _TASKS[served]
            raise InvalidRequestError(
                f"the model {model.info.model!r} is served with --task {does}; this needs one with"
                f" --task {_TASKS[task]}",
                code="unsupported_endpoint",
            )
        lease.caller.check_priority(options.priority)
        if not 1 <= num_inputs <= MAX_INPUTS:
            raise InvalidRequestError(
                f"there are {num_inputs} inputs; there must be 1 to {MAX_INPUTS}", field="input"
            )
        for name, value, most in (
            ("request_id", options.request_id, MAX_REQUEST_ID_CHARACTERS - len(f"#{MAX_INPUTS}")),
            ("cache_salt", options.cache_salt, MAX_CACHE_SALT_CHARACTERS),
        ):
            if len(value) > most:
                raise InvalidRequestError(
                    f"{name} has {len(value)} characters; the limit is {most}", field=name
                )
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        return _Run(model, options, record, lease, deadline_s)

    async def _vectors(self, run: "_Run") -> Vectors:
        """Charges a request and returns the vectors of its inputs."""
        lease = run.lease
        run.record.note_tokenized()
        lease.charge_prompt(sum(map(len, run.prompts)))
        results: list[TokenBatch] = [TokenBatch()] * len(run.prompts)
        remaining = iter(enumerate(run.prompts))

        async def work() -> None:
            for index, token_ids in remaining:
                results[index] = await self._read(run, index, token_ids)

        lease.attach(run.stop)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(MAX_IN_FLIGHT, len(run.prompts))):
                    tasks.create_task(work())
        except BaseExceptionGroup as group:
            error = group.exceptions[0]
            # A caller who leaves pays: engines may have computed most inputs.
            if isinstance(error, EngineUnavailableError | OverloadedError):
                lease.cancel()
            raise error from None
        usage = Usage(
            prompt_tokens=sum(_usage(each).prompt_tokens for each in results),
            cached_tokens=sum(_usage(each).cached_tokens for each in results),
        )
        run.record.observe(
            Output(request_id=run.options.request_id, text="", finish_reason=STOP, usage=usage)
        )
        matrix = np.frombuffer(b"".join(each.vector for each in results), "<f4")
        return Vectors(matrix.reshape(len(results), run.pooling.size), usage)

    async def _read(self, run: "_Run", index: int, token_ids: list[int]) -> TokenBatch:
        """Submits one input and waits for its vector."""
        caller, options = run.lease.caller, run.options
        request = EngineRequest(
            request_id=caller.engine_request_id(sample_id(options.request_id, index)),
            prompt_token_ids=pack_uint32(token_ids),
            priority=options.priority,
            cache_salt=caller.cache_salt(options.cache_salt),
            adapter=run.model.adapter,
            adapter_digest=run.model.adapter_digest,
            deadline_s=run.deadline_s,
            traceparent=run.record.traceparent,
            pool=True,
        )
        stream = TokenStream(self._engine, request, model=run.model.info)
        run.live.add(stream)
        try:
            batch = await stream.read()
        finally:
            run.live.discard(stream)
            stream.abort()
        if len(batch.vector) != 4 * run.pooling.size:
            caller.check_known()  # a removed key ends its requests
            raise EngineFaultError("an engine ended a request for a vector without one")
        return batch


class _Run:
    """One request on its way."""

    def __init__(
        self,
        model: ServedModel,
        options: VectorOptions,
        record: RequestRecord,
        lease: Lease,
        deadline_s: float | None,
    ) -> None:
        self.model = model
        self.options = options
        self.record = record
        self.lease = lease
        self.deadline_s = deadline_s
        self.pooling: Pooling = model.info.pooling
        self.limit: int | None = None
        """Most tokens that an input keeps; None refuses a longer one."""
        if options.truncate_tokens is not None:
            self.limit = min(options.truncate_tokens, self.pooling.max_input_tokens)
        self.prompts: list[list[int]] = []
        self.live: set[TokenStream] = set()
        self._num_tokens = 0

    def add(self, token_ids: list[int]) -> None:
        """Adds an input, within the limits of one and of all."""
        most = self.pooling.max_input_tokens
        if not token_ids:
            raise InvalidRequestError(f"input {len(self.prompts)} is empty", field="input")
        if len(token_ids) > most:
            raise InvalidRequestError(
                f"input {len(self.prompts)} has {len(token_ids)} tokens; the limit is {most}",
                field="input",
                code="context_length_exceeded",
            )
        check_vocabulary(token_ids, self.model.info.vocab_size)
        self._num_tokens += len(token_ids)
        if self._num_tokens > MAX_TOKENS:
            raise InvalidRequestError(
                f"the inputs have over {MAX_TOKENS} tokens, the limit of a request", field="input"
            )
        self.prompts.append(token_ids)

    def stop(self) -> None:
        """Ends the inputs that engines have, after the caller's key was removed."""
        for stream in self.live:
            stream.abort()


def resized(matrix: Matrix, size: int, pooling: Pooling) -> Matrix:
    """Returns the first `size` elements of vectors, again of length 1 where the model's are.

    Source: Kusupati et al. 2022, "Matryoshka Representation Learning".
    """
    if size == pooling.size:
        return matrix
    shorter = matrix[:, :size]
    if not pooling.is_normalized:
        return shorter
    lengths = np.linalg.norm(shorter, axis=1, keepdims=True)
    result: Matrix = shorter / np.maximum(lengths, np.float32(1e-12))
    return result


def _prompt_named(pooling: Pooling, name: str | None) -> str:
    """Returns the text to put before inputs."""
    if name is None:
        return pooling.prompts.get(pooling.default_prompt_name, "")
    if name not in pooling.prompts:
        known = ", ".join(sorted(pooling.prompts)) or "none"
        raise InvalidRequestError(
            f"the model has no prompt {name[:64]!r}; it has {known}", field="prompt_name"
        )
    return pooling.prompts[name]


def _check_texts(texts: Sequence[str]) -> None:
    """Refuses texts that take too long to encode, cut or not."""
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"the texts to encode have over {MAX_CHARACTERS} characters, the limit of a request",
            field="input",
        )


def _usage(batch: TokenBatch) -> Usage:
    return Usage() if batch.usage is None else batch.usage
