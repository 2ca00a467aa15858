"""One Generate message of OpenEngine, as a call of the engine."""

import uuid
from collections.abc import Iterator, Sequence

import grpc

from protos.engine.v1.engine_pb2 import GenerateRequest
from protos.openengine.v1 import openengine_pb2
from services.engine.edge.stop_strings import StopRule, StopStrings
from services.engine.errors import EngineError, InvalidRequestError, UnsupportedError
from services.engine.openengine.failure import failure_to_proto
from services.engine.openengine.output import CallTotals, OpenEngineOutput
from services.engine.openengine.requests import (
    PRIORITY,
    TARGET_RANK,
    check_served,
    check_sizes,
    stop_rule,
    stop_token_ids,
    to_samples,
)
from services.engine.request import Request


class OpenEngineMessage:
    """Reads a message and answers in the protocol; see `CallMessage`."""

    def __init__(
        self, message: openengine_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> None:
        self._message = message
        self._context = context
        self._totals = CallTotals(message.request_id or uuid.uuid4().hex)

    @property
    def stop_rule(self) -> StopRule | None:
        """The stop strings, if there are some."""
        return stop_rule(self._message.stopping)

    def samples(self, *, max_model_len: int) -> Iterator[GenerateRequest]:
        """Yields one request per output.

        Raises:
            InvalidRequestError, UnsupportedError: the message is not served.
        """
        check_served(self._message)
        check_sizes(self._message, max_model_len=max_model_len)
        priority = priority_of(self._context)
        return to_samples(self._message, request_id=self._totals.request_id, priority=priority)

    def output(self, request: Request, stop_strings: StopStrings | None) -> OpenEngineOutput:
        """Returns the collector of an output."""
        return OpenEngineOutput(
            request,
            self._totals,
            own_stop_token_ids=frozenset(stop_token_ids(self._message.stopping)),
            stop_strings=stop_strings,
        )

    def failure(self, error: EngineError) -> openengine_pb2.GenerateResponse:
        """Returns the last message of an accepted request that failed."""
        return openengine_pb2.GenerateResponse(
            request_id=self._totals.request_id, error=failure_to_proto(error)
        )


def priority_of(context: grpc.aio.ServicerContext) -> int:
    """Returns the priority in a call's metadata.

    Raises:
        InvalidRequestError, UnsupportedError: the metadata are malformed, or choose a rank.
    """
    metadata = context.invocation_metadata() or ()
    if _number_of(metadata, TARGET_RANK) is not None:
        raise UnsupportedError(f"{TARGET_RANK} is not served: the engine chooses the rank")
    return _number_of(metadata, PRIORITY) or 0


def _number_of(metadata: Sequence[tuple[str, str | bytes]], name: str) -> int | None:
    """Returns the number in a call's metadata; None if there is none.

    Raises:
        InvalidRequestError: it is given twice, or no number.
    """
    values = [value for key, value in metadata if key == name]
    if not values:
        return None
    try:
        [value] = values
        return int(value)
    except ValueError:
        raise InvalidRequestError(f"{name} must be one number") from None
