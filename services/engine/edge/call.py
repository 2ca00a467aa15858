"""One Generate call of any protocol, with one request per output."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import grpc

from protos.common.v1.sampling_pb2 import SamplingParams
from protos.engine.v1.engine_pb2 import GenerateRequest
from services.engine.core.engine_core import EngineCore
from services.engine.edge.edge import Edge
from services.engine.edge.pooled_call import PooledCall
from services.engine.edge.status import count_rejection
from services.engine.edge.stop_strings import StopRule, StopStrings
from services.engine.errors import (
    DuplicateRequestError,
    EngineError,
    EngineUnavailableError,
    InvalidRequestError,
)
from services.engine.request import FinishReason, OutputSink, Request, RequestOutput
from services.telemetry.trace_context import read_traceparent

MAX_SAMPLES = 16
SEEDS = 2**64
EndingT = TypeVar("EndingT")


def check_lengths(
    num_tokens: int, lists: Iterable[tuple[str, Sized, int]], *, max_model_len: int
) -> None:
    """Refuses long prompts and lists before they are copied for each output.

    lists: the name, the entries and the limit of each.

    Raises:
        InvalidRequestError: the prompt or a list has too many entries.
    """
    if num_tokens >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_tokens} tokens; the limit is {max_model_len - 1}, which leaves"
            f" one for output in a context of {max_model_len}"
        )
    for name, entries, limit in lists:
        if len(entries) > limit:
            raise InvalidRequestError(f"{name} has {len(entries)} entries; the limit is {limit}")


def samples_of(
    sampling: SamplingParams, count: int, *, request_id: str, **fields: Any
) -> Iterator[GenerateRequest]:
    """Yields one request of the engine's own protocol per output, with these fields.

    It is lazy: the first may be refused before the others are copied. Each seed follows the
    previous one's; only the first output reports the prompt.
    """
    for index in range(count):
        own = SamplingParams()
        own.CopyFrom(sampling)
        if index:
            own.ClearField("prompt_logprobs")
            if sampling.HasField("seed"):
                own.seed = (sampling.seed + index) % SEEDS
        own_id = f"{request_id}#{index}" if index else request_id
        yield GenerateRequest(request_id=own_id, sampling=own, **fields)


class CallOutput(ABC, Generic[EndingT]):
    """Collects one output until it is written."""

    def __init__(
        self,
        request: Request,
        own_stop_token_ids: frozenset[int] = frozenset(),
        strings: StopStrings | None = None,
    ) -> None:
        self.request = request
        self.is_told = False
        """Whether the ending was written."""
        self._own_stop_token_ids = own_stop_token_ids
        self._strings = strings
        self._ending: EndingT | None = None

    @property
    def is_over(self) -> bool:
        """Whether the output is complete; its request may still run."""
        return self._ending is not None

    def take(self, output: RequestOutput) -> None:
        """Takes one step's output; ignores it after the end."""
        if self.is_over:
            return
        token_ids = output.token_ids
        found = self._strings.find(token_ids) if self._strings is not None else None
        if found is not None:
            token_ids = token_ids[: found.num_tokens]
        self._add(token_ids, output)
        if found is not None:
            self._ending = self._stopped(found.text)
        elif output.finish_reason is not None:
            self._ending = self._ended(output.finish_reason, output.stop_token_id)

    @abstractmethod
    def responses(self) -> Sequence[Any]:
        """Returns the messages to write now."""

    @abstractmethod
    def _add(self, token_ids: Sequence[int], output: RequestOutput) -> None:
        """Takes the tokens of a step up to a stop string, and what comes with them."""

    @abstractmethod
    def _stopped(self, text: str) -> EndingT:
        """Returns the ending of an output that a stop string ended."""

    @abstractmethod
    def _ended(self, reason: FinishReason, stop_token_id: int | None) -> EndingT:
        """Returns the ending of an output that its request ended."""


class CallMessage(Protocol):
    """One message of a protocol that asks for output."""

    @property
    def stop_rule(self) -> StopRule | None:
        """The stop strings, if there are some."""

    def samples(self, *, max_model_len: int) -> Iterator[GenerateRequest]:
        """Yields one request of the engine's own protocol per output, or refuses the message."""

    def output(self, request: Request, stop_strings: StopStrings | None) -> CallOutput[Any]:
        """Returns the collector of an output of a request that this message made."""

    def failure(self, error: EngineError) -> Any | None:
        """Returns the last message of an accepted request that failed; None makes it a status."""


class GenerateCall(OutputSink):
    """Serves one call and is the sink of its requests, whose handles are their indices.

    Unread output is merged; the context length bounds it.
    """

    def __init__(self, edge: Edge, context: grpc.aio.ServicerContext) -> None:
        self._edge = edge
        self._core = edge.core
        self.context = context
        self._outputs: list[CallOutput[Any]] = []
        self._error: EngineError | None = None
        self._is_aborted = False
        self._wake = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Takes one step's output of one request, unless the call has ended."""
        if not self._outputs:
            return
        target = self._outputs[output.request.handle]
        if not target.is_over:
            self._error = self._error or output.error
        target.take(output)

    def flush(self) -> None:
        """Lets the output be written."""
        self._wake.set()

    def abort(self) -> None:
        """Ends the requests early; the call then writes their ends."""
        self._is_aborted = True
        for output in self._outputs:
            self._core.abort(output.request)

    async def run(self, message: CallMessage) -> None:
        """Serves the call, and ends its requests with it.

        Raises:
            EngineError: it was refused before any message, or a request failed.
        """
        try:
            await self._admit(message)
            # The request was admitted: from now on the caller cannot safely resend it.
            await self.context.send_initial_metadata(())
            while not all(output.is_told for output in self._outputs):
                await self._wake.wait()
                self._wake.clear()
                error = self._error  # one that comes during a write comes after more output
                await self._tell()
                if error is not None:
                    await self._fail(message, error)
                    return
        finally:
            self.abort()
            self._outputs = []  # their requests refer to this call

    async def _admit(self, message: CallMessage) -> None:
        """Submits all requests to the core, or none."""
        outputs: list[CallOutput[Any]] = []
        try:
            self._core.check_ready()
            for request in self._requests_of(message):
                outputs.append(await self._prepare(message, request))
            self._submit(outputs)
        except BaseException as error:
            for output in outputs:
                output.request.release()
            if isinstance(error, EngineError):
                count_rejection(self._core.counters, error)
            raise

    def _submit(self, outputs: list[CallOutput[Any]]) -> None:
        if self._is_aborted:
            raise EngineUnavailableError("the caller gave the request up")
        self._outputs = outputs
        for output in outputs:
            self._core.submit(output.request)

    def _requests_of(self, message: CallMessage) -> list[Request]:
        timeout_s = self.context.time_remaining()
        traceparent = read_traceparent(self.context.invocation_metadata())
        requests = [
            self._edge.reader.from_generate(
                sample, self, timeout_s=timeout_s, traceparent=traceparent
            )
            for sample in message.samples(max_model_len=self._edge.model.max_model_len)
        ]
        for index, request in enumerate(requests):
            request.handle = index
        return requests

    async def _prepare(self, message: CallMessage, request: Request) -> CallOutput[Any]:
        """Compiles a request's grammar and stop strings, which may take a while."""
        rule = message.stop_rule
        strings = None if rule is None else StopStrings(rule, await self._edge.grammars.tokenizer())
        if request.structured_output is not None:
            request.constraint = await self._edge.grammars.constrain(request.structured_output)
        return message.output(request, strings)

    async def _tell(self) -> None:
        """Writes pending output, and ends the requests stopped by a stop string."""
        for output in self._outputs:
            if output.is_over:
                self._core.abort(output.request)
            for response in output.responses():
                await self._edge.write(self.context, response)

    async def _fail(self, message: CallMessage, error: EngineError) -> None:
        last = message.failure(error)
        if last is None:
            raise error
        await self._edge.write(self.context, last)


class OpenCalls:
    """The calls of one protocol that have a name, so that others can end them."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls: dict[str, GenerateCall | PooledCall] = {}

    @contextmanager
    def live(self, name: str, call: GenerateCall | PooledCall) -> Iterator[None]:
        """Makes a call known while it is served; an empty name cannot be found.

        Raises:
            DuplicateRequestError: a live call has the name.
        """
        if name in self._calls:
            error = DuplicateRequestError(f"request_id {name!r} belongs to a live request")
            count_rejection(self._core.counters, error)
            raise error
        if name:
            self._calls[name] = call
        try:
            yield
        finally:
            if name:
                del self._calls[name]

    def find(self, name: str) -> GenerateCall | PooledCall | None:
        """Returns the live call of a name."""
        return self._calls.get(name)
