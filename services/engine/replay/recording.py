"""Reads recording files."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from google.protobuf import proto
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from protos.engine.v1.engine_pb2 import WatchStepsResponse
from protos.engine.v1.recording_pb2 import RecordingHeader, Snapshot
from services.engine.batch import BatchDescriptor, GraphKey, GraphKind

FORMAT = "octavo-recording"
VERSION = 4
"""Version 1 has graph keys without a kind; `add_kind` adds it. Before version 3 every step made as
many drafts as there could be; `add_next_drafts` says so. Before version 4 there are no images."""
FORMER_UNIFORM_FIELD = 4
"""Field number of GraphKey.uniform in version 1: every request has max_q_len query tokens."""

_M = TypeVar("_M", bound=Message)
_HEADER_BYTES = 64
"""Bytes at the beginning of a file, with the name of its format."""


class ReplayError(Exception):
    """A recording cannot be replayed; the message is for the operator."""


class _CutShortError(Exception):
    """The file ends in the middle of a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording, read once and checked.

    is_cut: the file ends in the middle of a message, which is ignored. images: the patches of those
    before the steps that were read so far, by digest.
    """

    path: Path
    version: int
    snapshot: Snapshot
    num_steps: int
    is_cut: bool
    images: dict[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> "Recording":
        """Reads and checks a file.

        Raises:
            ReplayError: it is not a recording, has another version, or is damaged.
        """
        try:
            with path.open("rb") as file:
                version, snapshot = _read_opening(file, path)
                num_steps, is_cut = _check_steps(file, path, snapshot.next_step_id)
        except OSError as error:
            raise ReplayError(f"{path} cannot be read: {error.strerror}") from error
        return cls(
            path=path, version=version, snapshot=snapshot, num_steps=num_steps, is_cut=is_cut
        )

    def steps(self) -> Iterator[WatchStepsResponse]:
        """Reads and yields the steps in order."""
        with self.path.open("rb") as file:
            _read_opening(file, self.path)
            num_left = self.num_steps
            while num_left:
                step = _read(WatchStepsResponse, file, self.path)
                if step is None:
                    raise ReplayError(f"{self.path} became shorter while it was read")
                if step.HasField("image"):
                    self.images[step.image.digest] = step.image.patches
                    continue
                num_left -= 1
                if self.version == 1 and step.descriptor.HasField("graph_key"):
                    add_kind(step.descriptor.graph_key)
                if self.version < 3:
                    add_next_drafts(step.descriptor)
                yield step


def add_kind(key: GraphKey) -> None:
    """Adds the kind to a graph key of version 1."""
    fields = UnknownFieldSet(key)
    numbers = {fields[index].field_number for index in range(len(fields))}
    if FORMER_UNIFORM_FIELD in numbers:
        key.kind = GraphKind.GRAPH_KIND_DECODE
    elif key.graph_bs < key.num_tokens:
        key.kind = GraphKind.GRAPH_KIND_MIXED
    else:
        key.kind = GraphKind.GRAPH_KIND_PIECEWISE
    key.DiscardUnknownFields()


def add_next_drafts(descriptor: BatchDescriptor) -> None:
    """Adds the number of drafts that a step before version 3 made."""
    if descriptor.HasField("spec_decode_metadata"):
        metadata = descriptor.spec_decode_metadata
        metadata.num_next_drafts = metadata.num_spec_steps


def _read_opening(file: IO[bytes], path: Path) -> tuple[int, Snapshot]:
    """Reads everything before the first step: the version and the snapshot."""
    # Otherwise the first bytes of another file could be read as an enormous length.
    is_recording = FORMAT.encode() in file.read(_HEADER_BYTES)
    file.seek(0)
    try:
        header = _read(RecordingHeader, file, path) if is_recording else None
        if header is None or header.format != FORMAT:
            raise ReplayError(f"{path} is not a recording: `octavo record` makes one")
        if header.version not in range(1, VERSION + 1):
            raise ReplayError(
                f"{path} has version {header.version} of the format; this engine reads "
                f"1 to {VERSION}"
            )
        opening = _read(WatchStepsResponse, file, path)
    except _CutShortError:
        header = opening = None
    if header is None or opening is None or not opening.HasField("snapshot"):
        raise ReplayError(f"{path} ends before the first step")
    return header.version, opening.snapshot


def _check_steps(file: IO[bytes], path: Path, next_step_id: int) -> tuple[int, bool]:
    """Returns the number of whole steps, and whether the file ends inside another."""
    num_steps = 0
    while True:
        try:
            step = _read(WatchStepsResponse, file, path)
        except _CutShortError:
            return num_steps, True
        if step is None:
            return num_steps, False
        if step.HasField("image"):
            continue
        expected = next_step_id + num_steps
        if step.descriptor.step_id != expected or step.result.step_id != expected:
            raise ReplayError(
                f"{path} has step {step.descriptor.step_id} with the result of step "
                f"{step.result.step_id} where step {expected} belongs"
            )
        num_steps += 1


def _read(kind: type[_M], file: IO[bytes], path: Path) -> _M | None:
    """Reads one message; None at the end of the file."""
    try:
        return proto.parse_length_prefixed(kind, file)  # type: ignore[arg-type]  # any buffered file will do
    except (DecodeError, ValueError) as error:
        if not file.read(1):
            raise _CutShortError from error
        raise ReplayError(f"{path} is damaged before byte {file.tell()}: {error}") from error
