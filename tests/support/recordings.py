"""Recording files as `octavo record` writes them, made without an engine's processes."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from google.protobuf import proto
from google.protobuf.message import Message

from models.config import ModelConfig
from protos.engine.v1.engine_pb2 import WatchStepsResponse
from protos.engine.v1.recording_pb2 import EngineSettings, RecordingHeader, Snapshot
from services.engine.batch import BatchDescriptor, StepResult
from services.engine.checkpoint.model_folder import config_sha256
from services.engine.limits import StepLimits
from services.engine.prompt_image import EncoderImage
from services.engine.rpc.recording import recorded_image

FORMAT = "octavo-recording"


def write_recording(
    path: Path,
    steps: Iterable[tuple[BatchDescriptor, StepResult]] = (),
    *,
    snapshot: Snapshot | None = None,
    images: Iterable[EncoderImage] = (),
    header: RecordingHeader | None = None,
) -> Path:
    """Writes a recording; without a snapshot it begins with the first step of a worker.

    images: of all rows of all steps.
    """
    opening = Snapshot(next_step_id=1)
    opening.MergeFrom(snapshot or Snapshot())
    messages: list[Message] = [
        header or RecordingHeader(format=FORMAT, version=2),
        WatchStepsResponse(snapshot=opening),
        *(recorded_image(each) for each in images),
        *(WatchStepsResponse(descriptor=order, result=result) for order, result in steps),
    ]
    write_messages(path, messages)
    return path


def write_messages(path: Path, messages: Sequence[Message]) -> None:
    """Writes messages, each preceded by its length."""
    with path.open("wb") as file:
        for message in messages:
            proto.serialize_length_prefixed(message, file)


def edit_recording(
    path: Path, target: Path, edit: Callable[[WatchStepsResponse], bool]
) -> WatchStepsResponse:
    """Copies a recording with one step changed; returns that step.

    `edit` is shown one step after the other until it says that it has changed one.
    """
    messages: list[Message] = []
    edited = None
    with path.open("rb") as file:
        messages.append(proto.parse_length_prefixed(RecordingHeader, file))
        while (message := proto.parse_length_prefixed(WatchStepsResponse, file)) is not None:
            if edited is None and not message.HasField("snapshot") and edit(message):
                edited = message
            messages.append(message)
    write_messages(target, messages)
    assert edited is not None, "no step was changed"
    return edited


def engine_settings(
    folder: Path, limits: StepLimits, *, num_blocks: int, dtype: str = "float32"
) -> EngineSettings:
    """Returns the facts in a recording of an engine that runs the model in `folder`."""
    return EngineSettings(
        model=folder.name,
        architecture=ModelConfig.from_folder(folder).architecture,
        config_sha256=config_sha256(folder),
        load_format="safetensors",
        device_name="cpu",
        dtype=dtype,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        num_blocks=num_blocks,
        num_speculative_tokens=limits.num_speculative_tokens,
    )
