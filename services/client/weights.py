"""Sends new weights to an engine, as a trainer does after a step. Needs neither torch nor NumPy."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, Self, TypeAlias

import grpc

from protos.engine.v1 import operator_pb2 as pb
from protos.engine.v1 import operator_pb2_grpc
from services.client.channel import OPEN, Access, open_blocking_channel
from services.client.errors import error_of_call

DEFAULT_ADDRESS = "127.0.0.1:50051"
CHUNK_BYTES = 2**21
TENSORS_PER_MESSAGE = 1000

Running: TypeAlias = Literal["finish", "recompute", "keep"]
"""The way of running requests: finish on the old weights, start over under the new ones, or go on
under the new ones with the keys and values of the old."""

RUNNING: dict[str, pb.RunningRequests] = {
    "finish": pb.RUNNING_REQUESTS_FINISH,
    "recompute": pb.RUNNING_REQUESTS_RECOMPUTE,
    "keep": pb.RUNNING_REQUESTS_KEEP,
}
_DTYPES = {
    "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "uint8": "U8", "int8": "I8",
    "int16": "I16", "int32": "I32", "int64": "I64", "bool": "BOOL",
}  # fmt: skip
"""A dtype of torch, NumPy or ml_dtypes -> the same in safetensors."""


class Tensor(Protocol):
    """A tensor of torch on the CPU, or an array of NumPy."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes."""

    @property
    def dtype(self) -> Any:
        """The type of its elements."""


class WeightsClient:
    """Changes the weights of one engine, which must have --weights-folder.

        with WeightsClient("127.0.0.1:50051") as engine:
            engine.upload(model.state_dict(), version="step-12", running="recompute")

    Methods block, as training loops do. Every one raises a subclass of
    `services.client.errors.OctavoError`; after one, the old weights serve.
    """

    def __init__(self, address: str = DEFAULT_ADDRESS, *, access: Access = OPEN) -> None:
        self._channel = open_blocking_channel(address, access.tls)
        self._stub = operator_pb2_grpc.OperatorServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._channel.close()

    def upload(
        self,
        tensors: Mapping[str, Tensor],
        *,
        version: str,
        running: Running = "finish",
        is_part: bool = False,
    ) -> pb.WeightsInfo:
        """Sends tensors by the names of the model's checkpoint, with a digest of each.

        Each is read twice, one at a time: first for its digest. On a GPU it must be copied first.
        """
        update = pb.WeightsUpdate(version=version, running=RUNNING[running], is_part=is_part)
        return _info(lambda: self._stub.UploadWeights(_messages(update, tensors)))

    def update(
        self,
        folder: str = "",
        *,
        version: str,
        running: Running = "finish",
        is_part: bool = False,
        shared_memory: str = "",
        sha256: bytes = b"",
    ) -> pb.WeightsInfo:
        """Loads a checkpoint under the engine's --weights-folder, or a shared memory object."""
        request = pb.UpdateWeightsRequest(
            update=pb.WeightsUpdate(version=version, running=RUNNING[running], is_part=is_part),
            sha256=sha256,
        )
        if shared_memory:
            request.shared_memory = shared_memory
        else:
            request.folder = folder
        return _info(lambda: self._stub.UpdateWeights(request))

    def show(self) -> pb.WeightsInfo:
        """Returns which weights serve."""
        return _info(lambda: self._stub.GetWeights(pb.GetWeightsRequest()))


def _info(call: Callable[[], Any]) -> pb.WeightsInfo:
    try:
        info: pb.WeightsInfo = call().weights
    except grpc.RpcError as error:
        raise error_of_call(error) from None
    return info


def _messages(
    update: pb.WeightsUpdate, tensors: Mapping[str, Tensor]
) -> Iterator[pb.UploadWeightsRequest]:
    yield pb.UploadWeightsRequest(update=update)
    infos = [
        pb.TensorInfo(
            name=name,
            dtype=_dtype(tensor),
            shape=tensor.shape,
            sha256=hashlib.sha256(_bytes(tensor)).digest(),
        )
        for name, tensor in tensors.items()
    ]
    for start in range(0, len(infos), TENSORS_PER_MESSAGE):
        some = pb.TensorList(tensors=infos[start : start + TENSORS_PER_MESSAGE])
        yield pb.UploadWeightsRequest(tensors=some)
    for tensor in tensors.values():
        for chunk in _chunks(_bytes(tensor)):
            yield pb.UploadWeightsRequest(data=chunk)


def _chunks(data: memoryview) -> Iterator[bytes]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield bytes(data[start : start + CHUNK_BYTES])


def _dtype(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"a tensor has the dtype {name}, which checkpoints do not have")
    return _DTYPES[name]


def _bytes(tensor: Any) -> memoryview:
    """Returns a tensor's elements, row by row."""
    if hasattr(tensor, "detach"):  # of torch, which has dtypes that NumPy lacks
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        tensor = flat.view(sys.modules["torch"].uint8).numpy()
    return memoryview(tensor.tobytes())
