"""`octavo record`: writes the steps of a running engine to a file."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import grpc
import typer
from google.protobuf import proto

from protos.engine.v1 import engine_pb2, engine_pb2_grpc
from protos.engine.v1.recording_pb2 import RecordingHeader
from services.client.channel import Tls, open_channel
from services.client.console import echo
from services.client.errors import InternalError, OctavoError, error_of_call
from services.client.flags import DEFAULT_ENGINE, EngineAddress
from services.processes.stop_signals import stop_signals

FORMAT = "octavo-recording"
VERSION = 4


def record(
    *,
    out: Annotated[Path, typer.Option(help="File to write; it appears when the recording ends.")],
    steps: Annotated[int | None, typer.Option(min=1, help="Stop after this many steps.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after this long.")] = None,
    engine: EngineAddress = DEFAULT_ENGINE,
    tls: Tls,
) -> None:
    """Records the engine's steps until `--steps`, `--seconds` or Ctrl-C.

    The file holds all token ids, so the engine must run with --allow-watch-tokens. `octavo replay`
    runs the steps again.

    Examples:
    - `octavo record --out trace.binpb`

    - `octavo record --out trace.binpb --steps 500`
    """
    partial = out.with_name(out.name + ".part")
    try:
        with partial.open("wb") as file:
            recorder = _Recorder(file)
            stop_reason = asyncio.run(_record(engine, tls, recorder, steps=steps, seconds=seconds))
        if recorder.has_snapshot:
            partial.replace(out)
            echo(recorder.summary(out))
        elif stop_reason is None:
            echo("nothing was recorded: it was stopped before the engine answered", err=True)
    except OSError as error:
        raise typer.BadParameter(f"{partial} cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    if stop_reason is not None:
        raise stop_reason


@dataclass(slots=True)
class _Recorder:
    """Writes and counts a stream's messages, each preceded by its length."""

    file: IO[bytes]
    has_snapshot: bool = False
    num_steps: int = 0
    num_tokens: int = 0
    next_step_id: int = 0

    def begin(self, response: engine_pb2.WatchStepsResponse) -> None:
        """Writes the header and the first message of a stream.

        Raises:
            InternalError: it has no snapshot.
        """
        if not response.HasField("snapshot"):
            raise InternalError("the engine sent no snapshot of its rows", code="INTERNAL")
        self._write(RecordingHeader(format=FORMAT, version=VERSION))
        self._write(response)
        self.file.flush()  # a script that waits for the recording to begin sees that it has
        self.next_step_id = response.snapshot.next_step_id
        self.has_snapshot = True

    def add(self, response: engine_pb2.WatchStepsResponse) -> None:
        """Writes one step, or an image that comes before it.

        Raises:
            InternalError: it is not the next one.
        """
        if response.HasField("image"):
            self._write(response)
            return
        step_id = response.descriptor.step_id
        if response.num_missed or step_id != self.next_step_id:
            raise InternalError(
                f"steps {self.next_step_id} to {step_id - 1} are missing: this recorder was too "
                "slow for the engine; the recording ends before them",
                code="DATA_LOSS",
            )
        self._write(response)
        self.next_step_id += 1
        self.num_steps += 1
        self.num_tokens += response.descriptor.context.num_tokens

    def summary(self, out: Path) -> str:
        """Returns what was recorded, in one line."""
        num_bytes = out.stat().st_size
        return f"{out}: {self.num_steps} steps, {self.num_tokens} tokens, {num_bytes} bytes"

    def _write(self, message: RecordingHeader | engine_pb2.WatchStepsResponse) -> None:
        proto.serialize_length_prefixed(message, self.file)  # type: ignore[arg-type]  # any buffered file


async def _record(
    address: str, tls: Tls, recorder: _Recorder, *, steps: int | None, seconds: float | None
) -> OctavoError | None:
    """Records until stopped; returns the cause if it was another one."""
    request = engine_pb2.WatchStepsRequest(include_token_ids=True, include_snapshot=True)
    async with open_channel(address, tls) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        call = stub.WatchSteps(request)
        _stop_at(call.cancel, seconds)
        try:
            async for response in call:
                if not recorder.has_snapshot:
                    recorder.begin(response)
                else:
                    recorder.add(response)
                if recorder.num_steps == steps:
                    return None
        except grpc.aio.AioRpcError as error:
            return error_of_call(error)
        except OctavoError as error:
            return error
        except asyncio.CancelledError:
            return None  # grpc.aio reports our own call.cancel() so
        return InternalError("the engine or its worker stopped", code="UNAVAILABLE")


def _stop_at(stop: Callable[[], object], seconds: float | None) -> None:
    """Calls `stop` after some seconds, and on Ctrl-C, SIGTERM or SIGHUP."""
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stop)
    if seconds is not None:
        loop.call_later(seconds, stop)
