"""Writes that cannot be done."""

import grpc
from google.protobuf.message import Message

from protos.frontend.v1.frontend_pb2 import SessionResponse
from services.frontend.rpc.writer import Writer


class LostClient:
    """A call whose client has gone and whose cancellation has not come yet."""

    async def write(self, message: Message) -> None:
        raise grpc.aio.InternalError(f"cannot send {message}")


async def test_what_is_written_to_a_client_that_is_gone_goes_nowhere():
    await Writer(LostClient(), timeout_s=5).write(SessionResponse())
