"""Recording files: whole ones, cut ones, and files that are none."""

from collections import Counter
from pathlib import Path

import pytest

from protos.engine.v1.recording_pb2 import RecordingHeader
from services.engine.batch import BatchDescriptor, GraphKey, GraphKind, pack_int32, step_result
from services.engine.replay.recording import Recording, ReplayError, add_kind
from tests.support.recordings import FORMAT, write_recording

NUM_STEPS = 3
RECORDED = Path(__file__).parents[3] / "support" / "recorded"


def make_steps(*step_ids):
    return [(BatchDescriptor(step_id=n), step_result(n, [n, n + 1])) for n in step_ids]


@pytest.fixture
def path(tmp_path):
    return write_recording(tmp_path / "trace.binpb", make_steps(1, 2, 3))


def test_a_whole_recording_gives_its_steps_every_time(path):
    recording = Recording.open(path)
    assert (recording.num_steps, recording.is_cut) == (NUM_STEPS, False)
    for _ in range(2):
        steps = list(recording.steps())
        assert [step.descriptor.step_id for step in steps] == [1, 2, 3]
        assert steps[2].result.token_ids == pack_int32([3, 4])


def test_a_recording_cut_anywhere_keeps_its_whole_steps(path, tmp_path):
    content = path.read_bytes()
    sizes = {}
    for num_steps in range(NUM_STEPS + 1):
        steps = make_steps(*range(1, num_steps + 1))
        sizes[write_recording(tmp_path / "part", steps).stat().st_size] = num_steps
    first_step = min(sizes)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        if size < first_step:
            with pytest.raises(ReplayError, match=r"not a recording|before the first step"):
                Recording.open(path)
            continue
        recording = Recording.open(path)
        assert recording.num_steps == sizes[max(end for end in sizes if end <= size)]
        assert recording.is_cut == (size not in sizes)
        assert len(list(recording.steps())) == recording.num_steps


@pytest.mark.parametrize("content", [b"", b"\n", b"hello world\n" * 100, b"\xff" * 5000])
def test_a_foreign_file_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(ReplayError, match="is not a recording"):
        Recording.open(path)


def test_another_version_is_refused(tmp_path):
    header = RecordingHeader(format=FORMAT, version=5)
    path = write_recording(tmp_path / "trace.binpb", header=header)
    with pytest.raises(ReplayError, match="version 5 of the format; this engine reads 1 to 4"):
        Recording.open(path)


@pytest.mark.parametrize(
    ("former", "kind"),
    [
        # num_tokens, graph_bs, max_q_len and, as field 4, uniform
        ("08 0c 10 04 18 03 20 01", GraphKind.GRAPH_KIND_DECODE),
        ("08 01 10 01 18 01 20 01", GraphKind.GRAPH_KIND_DECODE),
        ("08 10 10 06 18 10", GraphKind.GRAPH_KIND_MIXED),
        ("08 02 10 01 18 02", GraphKind.GRAPH_KIND_MIXED),
        ("08 10 10 10 18 10", GraphKind.GRAPH_KIND_PIECEWISE),
        ("08 01 10 01 18 01", GraphKind.GRAPH_KIND_PIECEWISE),
    ],
)
def test_a_key_of_version_1_gets_its_kind(former, kind):
    key = GraphKey.FromString(bytes.fromhex(former))
    sizes = key.num_tokens, key.graph_bs, key.max_q_len
    add_kind(key)
    assert key == GraphKey(kind=kind, num_tokens=sizes[0], graph_bs=sizes[1], max_q_len=sizes[2])


def test_steps_of_version_1_have_keys_with_a_kind():
    recording = Recording.open(RECORDED / "with_drafts.binpb")
    assert recording.version == 1
    kinds = Counter(
        GraphKind.Name(step.descriptor.graph_key.kind).removeprefix("GRAPH_KIND_")
        if step.descriptor.HasField("graph_key")
        else None
        for step in recording.steps()
    )
    assert kinds == {"DECODE": 54, "PIECEWISE": 10, None: 36}


def test_steps_before_version_3_made_all_drafts():
    recording = Recording.open(RECORDED / "with_drafts.binpb")
    made = [step.descriptor.spec_decode_metadata for step in recording.steps()]
    assert {(each.num_spec_steps, each.num_next_drafts) for each in made} == {(2, 2)}


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ReplayError, match="cannot be read: No such file"):
        Recording.open(tmp_path / "nothing")


@pytest.mark.parametrize("step_ids", [(2, 3), (1, 3), (1, 1)])
def test_steps_that_do_not_follow_each_other_are_refused(tmp_path, step_ids):
    path = write_recording(tmp_path / "trace.binpb", make_steps(*step_ids))
    with pytest.raises(ReplayError, match=r"where step \d belongs"):
        Recording.open(path)


def test_damage_before_the_end_is_reported_with_its_position(path):
    content = bytearray(path.read_bytes())
    # A wire type that does not exist, in the middle of the file.
    content[content.index(pack_int32([2, 3])) - 2] = 0x0F
    path.write_bytes(content)
    with pytest.raises(ReplayError, match="is damaged before byte"):
        Recording.open(path)
