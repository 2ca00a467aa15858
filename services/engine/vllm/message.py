"""One Generate message of the gateway, as a call of the engine."""

from collections.abc import Iterator
from dataclasses import dataclass

from smg_grpc_proto.generated import vllm_engine_pb2

from protos.engine.v1.engine_pb2 import GenerateRequest
from services.engine.edge.stop_strings import StopRule, StopStrings
from services.engine.errors import EngineError
from services.engine.request import Request
from services.engine.vllm.output import VllmOutput
from services.engine.vllm.requests import check_served, check_sizes, stop_rule, to_samples


@dataclass(frozen=True, slots=True)
class VllmMessage:
    """Reads a message and answers in the gateway's protocol; see `CallMessage`."""

    message: vllm_engine_pb2.GenerateRequest

    @property
    def stop_rule(self) -> StopRule | None:
        """The stop strings, if there are some."""
        return stop_rule(self.message.sampling_params)

    def samples(self, *, max_model_len: int) -> Iterator[GenerateRequest]:
        """Yields one request per output.

        Raises:
            InvalidRequestError, UnsupportedError: the message is not served.
        """
        check_served(self.message)
        check_sizes(self.message, max_model_len=max_model_len)
        return to_samples(self.message)

    def output(self, request: Request, stop_strings: StopStrings | None) -> VllmOutput:
        """Returns the collector of an output."""
        return VllmOutput(
            request,
            is_streamed=self.message.stream,
            own_stop_token_ids=frozenset(self.message.sampling_params.stop_token_ids),
            stop_strings=stop_strings,
        )

    def failure(self, error: EngineError) -> None:
        """Returns None: failures are statuses here."""
        del error
