"""`octavo record` against an engine that streams what the test says."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from protos.engine.v1 import engine_pb2_grpc
from protos.engine.v1.batch_pb2 import BatchDescriptor, Context, StepResult
from protos.engine.v1.engine_pb2 import WatchStepsResponse
from protos.engine.v1.recording_pb2 import RecordedImage, Snapshot
from services.client.cli import main
from services.client.commands.record import _Recorder
from services.engine.replay.recording import Recording
from tests.support.loop_time import LoopTime

FIRST_STEP = 7


def opening():
    return WatchStepsResponse(snapshot=Snapshot(next_step_id=FIRST_STEP))


def step(step_id, **fields):
    return WatchStepsResponse(
        descriptor=BatchDescriptor(step_id=step_id, context=Context(num_tokens=5)),
        result=StepResult(step_id=step_id),
        **fields,
    )


class Engine(engine_pb2_grpc.EngineServiceServicer):
    """Streams the responses, then ends the stream, fails it or leaves it open."""

    def __init__(self, responses, ending):
        self.responses = responses
        self.ending = ending
        self.request = None

    def WatchSteps(self, request, context):  # noqa: N802
        self.request = request
        yield from self.responses
        if self.ending == "open":
            gone = threading.Event()
            context.add_callback(gone.set)
            gone.wait(60)
        elif self.ending == "failed":
            context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is draining")


@contextmanager
def serving(responses, *, ending="open") -> Iterator[tuple[Engine, str]]:
    engine = Engine(responses, ending)
    server = grpc.server(ThreadPoolExecutor(2))
    engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield engine, f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@pytest.fixture
def record(tmp_path, capsys):
    """Records to a file; returns exit code, output, error output and the file's path."""

    def run(address, *flags):
        path = tmp_path / "trace.binpb"
        with pytest.raises(SystemExit) as exited:
            main(["record", "--out", str(path), "--engine", address, *flags])
        captured = capsys.readouterr()
        assert [left for left in tmp_path.iterdir() if left != path] == []
        return exited.value.code or 0, captured.out, captured.err, path

    return run


def test_a_recording_stops_after_its_number_of_steps_and_reports_its_content(record):
    with serving([opening(), *map(step, range(7, 12))]) as (engine, address):
        code, out, _, path = record(address, "--steps", "3")
    assert code == 0
    assert engine.request.include_token_ids
    assert engine.request.include_snapshot
    assert out.strip().replace("\n", "") == (
        f"{path}: 3 steps, 15 tokens, {path.stat().st_size} bytes"
    )
    recording = Recording.open(path)
    assert (recording.num_steps, recording.is_cut) == (3, False)
    assert recording.snapshot.next_step_id == FIRST_STEP


def test_images_are_recorded_and_are_no_steps(record):
    image = WatchStepsResponse(image=RecordedImage(digest=b"d", patches=b"p"))
    with serving([opening(), image, *map(step, range(7, 12))]) as (_, address):
        code, _, _, path = record(address, "--steps", "2")
    recording = Recording.open(path)
    assert (code, recording.num_steps) == (0, 2)
    assert len(list(recording.steps())) == 2
    assert recording.images == {b"d": b"p"}


def test_a_recording_stops_after_its_time_limit(record, monkeypatch):
    add = _Recorder.add

    def add_and_let_time_pass(recorder, response):
        add(recorder, response)
        LoopTime().wind(3600)

    monkeypatch.setattr(_Recorder, "add", add_and_let_time_pass)
    with serving([opening(), step(7)]) as (_, address):
        code, out, _, path = record(address, "--seconds", "3600")
    assert (code, Recording.open(path).num_steps) == (0, 1)
    assert "1 steps" in out


@pytest.mark.parametrize("late", [step(11, num_missed=3), step(11)])
def test_missed_steps_end_the_recording_and_what_came_before_is_kept(record, late):
    with serving([opening(), step(7), late, step(12)]) as (_, address):
        code, out, err, path = record(address)
    assert code == 1
    assert "steps 8 to 10 are missing" in err
    assert "1 steps" in out
    assert Recording.open(path).num_steps == 1


@pytest.mark.parametrize(
    ("ending", "message"), [("ended", "worker stopped"), ("failed", "is draining")]
)
def test_an_engine_that_goes_away_is_reported_and_the_steps_are_kept(record, ending, message):
    with serving([opening(), step(7), step(8)], ending=ending) as (_, address):
        code, _, err, path = record(address)
    assert code == 1
    assert message in err
    assert Recording.open(path).num_steps == 2


def test_without_a_snapshot_there_is_no_file(record):
    with serving([step(7)]) as (_, address):
        code, _, err, path = record(address)
    assert code == 1
    assert "no snapshot" in err
    assert not path.exists()


def test_an_engine_that_does_not_answer_leaves_no_file(record):
    code, _, err, path = record("127.0.0.1:1")
    assert code == 1
    assert "cannot connect" in err
    assert not path.exists()


def test_a_folder_that_does_not_exist_is_reported(tmp_path, capsys):
    with pytest.raises(SystemExit) as exited:
        main(["record", "--out", str(tmp_path / "nowhere" / "trace.binpb")])
    assert exited.value.code == 2
    assert "cannot be written" in capsys.readouterr().err
