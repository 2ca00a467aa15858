"""Updates of the weights over gRPC: reading what callers send."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Protocol, TypeVar

from protos.engine.v1 import operator_pb2 as pb
from services.engine.checkpoint.kept_weights import KeptWeights
from services.engine.checkpoint.weights_upload import MAX_TENSORS, SentTensor, WeightsUpload
from services.engine.core.weights import Running, Update, Weights
from services.engine.edge.request_reader import check_known
from services.engine.errors import DeadlineExpiredError, InvalidRequestError
from services.transport.message_reader import RefusedMessage

SILENCE_LIMIT_S = 60.0
"""Longest wait for the next message of an upload, as no other update can run meanwhile."""
SHA256_BYTES = 32

_RUNNING = {
    pb.RUNNING_REQUESTS_UNSPECIFIED: Running.FINISH,
    pb.RUNNING_REQUESTS_FINISH: Running.FINISH,
    pb.RUNNING_REQUESTS_RECOMPUTE: Running.RECOMPUTE,
    pb.RUNNING_REQUESTS_KEEP: Running.KEEP,
}


def weights_info(weights: Weights) -> pb.WeightsInfo:
    """Describes the weights that serve."""
    return pb.WeightsInfo(
        version=weights.version,
        num_updates=weights.num_updates,
        num_moved_requests=weights.num_moved,
        pause_ms=1000 * weights.pause_s,
        is_updating=weights.is_updating,
    )


async def update_from_host(weights: Weights, request: pb.UpdateWeightsRequest) -> None:
    """Replaces the weights by those of a folder or of shared memory; see `Weights.update`."""
    if len(request.sha256) not in (0, SHA256_BYTES):
        raise InvalidRequestError(f"sha256 must have {SHA256_BYTES} bytes", field="sha256")
    folder, is_shared = weights.folder, request.WhichOneof("source") == "shared_memory"
    find = partial(folder.copy_shared_memory, request.shared_memory)
    find = find if is_shared else partial(folder.find, request.folder)

    async def obtain() -> KeptWeights:
        return await _made(partial(find, request.sha256))

    await weights.update(_read_update(request.update), obtain)


async def update_from_caller(
    weights: Weights, messages: AsyncIterator[pb.UploadWeightsRequest | RefusedMessage]
) -> None:
    """Replaces the weights by those of a stream; see `Weights.update`."""
    parts = _Parts(messages)
    first = await parts.next()
    if first is None or first.WhichOneof("part") != "update":
        raise InvalidRequestError("an upload begins with its update")

    async def obtain() -> KeptWeights:
        return await _receive(weights, parts)

    await weights.update(_read_update(first.update), obtain)


async def _receive(weights: Weights, parts: "_Parts") -> KeptWeights:
    tensors: list[SentTensor] = []
    part = await parts.next()
    while part is not None and part.WhichOneof("part") == "tensors":
        tensors += map(_read_tensor, part.tensors.tensors)
        if len(tensors) > MAX_TENSORS:
            raise InvalidRequestError(f"an update has at most {MAX_TENSORS} tensors")
        part = await parts.next()
    upload = await _made(partial(WeightsUpload, weights.folder, tensors))
    try:
        while part is not None:
            await asyncio.to_thread(upload.write, _data_of(part))
            part = await parts.next()
        return await asyncio.to_thread(upload.finish)
    except BaseException:
        upload.discard()
        raise


class _Discardable(Protocol):
    def discard(self) -> None: ...


_Copy = TypeVar("_Copy", bound=_Discardable)


async def _made(make: Callable[[], _Copy]) -> _Copy:
    """Makes a copy in a thread, which goes if the caller leaves meanwhile."""
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_discard)
        raise


def _discard(making: "asyncio.Future[_Copy]") -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().discard()


class _Parts:
    """The messages of an upload, each checked."""

    def __init__(self, messages: AsyncIterator[pb.UploadWeightsRequest | RefusedMessage]) -> None:
        self._messages = messages

    async def next(self) -> pb.UploadWeightsRequest | None:
        """Returns the next message, None after the last one.

        Raises:
            DeadlineExpiredError: none comes in time.
            InvalidRequestError: it is malformed.
        """
        try:
            async with asyncio.timeout(SILENCE_LIMIT_S):
                message = await anext(self._messages, None)
        except TimeoutError:
            raise DeadlineExpiredError(
                f"the upload sent nothing for {SILENCE_LIMIT_S:g} s"
            ) from None
        if isinstance(message, RefusedMessage):
            raise InvalidRequestError(str(message.error))
        if message is not None:
            check_known(message)
        return message


def _data_of(part: pb.UploadWeightsRequest) -> bytes:
    if part.WhichOneof("part") != "data":
        raise InvalidRequestError("only bytes follow the tensors' descriptions")
    data: bytes = part.data
    return data


def _read_update(update: pb.WeightsUpdate) -> Update:
    running = _RUNNING.get(update.running)
    if running is None:
        raise InvalidRequestError(f"running is {update.running}", field="running")
    return Update(version=update.version, running=running, is_part=update.is_part)


def _read_tensor(tensor: pb.TensorInfo) -> SentTensor:
    return SentTensor(
        name=tensor.name, dtype=tensor.dtype, shape=tuple(tensor.shape), sha256=tensor.sha256
    )
