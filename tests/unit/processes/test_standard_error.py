"""Standard error without a reader holds nothing up; dropped lines are counted and reported."""

import os
import subprocess
import sys
import threading
from textwrap import dedent

import pytest

from services.processes.standard_error import LossyStream

PIPE_BYTES = 2**16


@pytest.fixture
def pipe():
    """The ends of a pipe; a test may close the reading one."""
    reading, writing = os.pipe()
    ends = {reading, writing}
    yield reading, writing, ends.discard
    for end in ends:
        os.close(end)


def numbered(count: int) -> list[str]:
    return [f"{number:08d}\n" for number in range(count)]


def read_until(fd: int, end: bytes) -> bytes:
    content = b""
    while not content.endswith(end):
        content += os.read(fd, 2**16)
    return content


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_pipe_without_a_reader_takes_what_fits_and_the_rest_is_counted(pipe, is_blocking):
    reading, writing, _ = pipe
    os.set_blocking(writing, is_blocking)
    stream = LossyStream(writing, max_pending_bytes=9000)
    stream.describe_drop = "{} dropped".format
    for line in numbered(20_000):  # 180 kB
        stream.write(line)
    dropped = stream.num_dropped_lines
    assert 20_000 - dropped <= (PIPE_BYTES + 2 * 9000) / 9
    said, kept = 0, []
    while said + len(kept) < 20_000:
        for line in read_until(reading, b"\n").decode().splitlines():
            number, _, is_report = line.partition(" ")
            if is_report:
                said += int(number)
            else:
                kept.append(int(number))
    assert (said, len(kept)) == (dropped, 20_000 - dropped)
    assert kept == sorted(kept)
    stream.write("on\n")
    assert read_until(reading, b"on\n") == b"on\n"


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_reader_that_went_away_costs_lines_only(pipe, is_blocking):
    reading, writing, forget = pipe
    os.set_blocking(writing, is_blocking)
    os.close(reading)
    forget(reading)
    stream = LossyStream(writing)
    for line in numbered(10):
        stream.write(line)
    stream.finish(60)
    assert stream.num_dropped_lines == 10


def test_a_full_disk_costs_lines_only():
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        stream = LossyStream(full)
        stream.write("a\nb\n")
        stream.finish(60)
    finally:
        os.close(full)
    assert stream.num_dropped_lines == 2


def test_a_line_is_written_at_once_however_it_is_put_together(pipe):
    reading, writing, _ = pipe
    os.set_blocking(writing, False)
    stream = LossyStream(writing)
    stream.write("one")
    stream.write(" line")
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 100)
    stream.write("\nand half")
    assert os.read(reading, 100) == b"one line\n"
    stream.finish(60)
    assert os.read(reading, 100) == b"and half\n"


def test_a_line_without_end_is_not_kept_for_ever(pipe):
    reading, writing, _ = pipe
    stream = LossyStream(writing)
    for _ in range(3):
        stream.write("x" * 30_000)
    assert len(read_until(reading, b"\n")) == 90_001


def test_lines_of_many_threads_are_whole(pipe):
    reading, writing, _ = pipe
    stream = LossyStream(writing)
    content: list[bytes] = []
    reader = threading.Thread(target=lambda: content.append(read_until(reading, b"end\n")))
    threads = [
        threading.Thread(target=lambda: [stream.write(line) for line in numbered(500)])
        for _ in range(4)
    ]
    for thread in [reader, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    stream.write("end\n")
    reader.join()
    assert sorted(content[0].decode().splitlines(keepends=True)) == sorted(
        [*numbered(500) * 4, "end\n"]
    )


def run(program: str, **streams) -> subprocess.Popen[bytes]:
    before = "import os, subprocess, sys\n"
    before += "from services.processes.standard_error import replace_standard_error\n"
    return subprocess.Popen([sys.executable, "-c", before + dedent(program)], **streams)


@pytest.mark.parametrize("writer", ["sys.stderr.write", "print", "warnings", "C", "child"])
def test_nothing_in_a_process_waits_for_a_reader_that_does_not_come(writer):
    write = {
        "sys.stderr.write": 'sys.stderr.write("x" * 100 + "\\n")',
        "print": 'print("x" * 100, file=sys.stderr)',
        "warnings": "import warnings; warnings.warn_explicit(str(n), UserWarning, 'f', n)",
        "C": "import faulthandler; faulthandler.dump_traceback()",
        "child": 'n % 1000 or subprocess.run(["sh", "-c", "head -c 99999 /dev/zero >&2; :"])',
    }[writer]
    reading, writing = os.pipe()
    with run(
        f"""
        replace_standard_error()
        for n in range(3000):
            {write}
        print("written", flush=True)
        """,
        stdout=subprocess.PIPE,
        stderr=writing,
    ) as process:
        os.close(writing)
        assert process.communicate(timeout=60)[0] == b"written\n"
    os.close(reading)
    assert process.returncode == 0


def test_the_parents_standard_error_keeps_its_mode():
    """A shell and its other programs share it, and do not expect a write to fail."""
    reading, writing = os.pipe()
    with run("replace_standard_error(); sys.stderr.write('x\\n')", stderr=writing) as process:
        process.wait(60)
    assert os.get_blocking(writing)
    assert os.read(reading, 10) == b"x\n"
    os.close(reading)
    os.close(writing)


def test_a_file_is_written_on_after_what_others_wrote(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        log.write(b"before\n")
        log.flush()
        with run("replace_standard_error(); sys.stderr.write('x\\n')", stderr=log) as process:
            process.wait(60)
        log.write(b"after\n")
    assert (tmp_path / "log").read_bytes() == b"before\nx\nafter\n"


def test_descriptors_that_are_closed_at_the_start_are_not_taken_by_others():
    with run(
        """
        replace_standard_error()
        sys.stderr.write("lost\\n")
        print(os.open("/dev/zero", os.O_RDONLY) > 2, flush=True)
        """,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: (os.close(0), os.close(2)),
    ) as process:
        output = process.communicate(timeout=60)[0]
        assert (output, process.returncode) == (b"True\n", 0)


def test_a_forked_process_that_closes_what_it_inherited_still_writes_to_standard_error():
    with run(
        """
        replace_standard_error()
        if os.fork() == 0:
            os.closerange(3, 1000)
            os.pipe()
            sys.stderr.write("child\\n")
            sys.stderr.finish(60)
            os._exit(0)
        os.wait()
        """,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.communicate(timeout=60)[1] == b"child\n"


def test_a_forked_process_writes_by_itself_and_repeats_nothing():
    reading, writing = os.pipe()
    with run(
        """
        replace_standard_error()
        for _ in range(1000):
            sys.stderr.write("p" * 99 + "\\n")  # more than the pipe takes
        pid = os.fork()
        if pid == 0:
            print(sys.stderr._num_pending_bytes, flush=True)
            sys.stderr.write("child\\n")
            os._exit(0)
        os.waitpid(pid, 0)
        os._exit(0)
        """,
        stdout=subprocess.PIPE,
        stderr=writing,
    ) as process:
        os.close(writing)
        assert process.communicate(timeout=60)[0] == b"0\n"
    os.close(reading)
